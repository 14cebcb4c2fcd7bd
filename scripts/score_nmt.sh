#!/bin/sh
# Translate a test set with a checkpoint and score it: prints the fairseq command, then runs it.
set -eu

usage() {
    cat <<'TEXT'
usage: scripts/score_nmt.sh DATASET CHECKPOINT [fairseq-generate flags...]
  DATASET     iwslt15-en-vi | iwslt15-vi-en | wmt19 | multi30k
  CHECKPOINT  of scripts/train_nmt.sh, fairseq-dpq-compact or fairseq-dpq-quantize; A.pt:B.pt
              translates with both
Flags after CHECKPOINT come last and win, e.g. --gen-subset valid or --beam 1.
Environment:
  DATA     binarised data          (default: data-bin/iwslt15, wmt19 or multi30k)
  OUT      folder of the output    (default: the first CHECKPOINT without .pt)
  DRY_RUN  1: print the command, do not run it
  PYTHON   the interpreter         (default: the checkout's .venv, else python3)
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
[ $# -ge 2 ] || { usage >&2; exit 2; }
dataset=$1 checkpoint=$2
shift 2

. "$(dirname "$0")/python.sh"
. "$(dirname "$0")/launch.sh"

case $dataset in
iwslt15-en-vi) folder=iwslt15 source=en target=vi ;;
iwslt15-vi-en) folder=iwslt15 source=vi target=en ;;
wmt19 | multi30k) folder=$dataset source=en target=de ;;
*) fail "DATASET '$dataset' is unknown; choose iwslt15-en-vi, iwslt15-vi-en, wmt19 or multi30k" ;;
esac

first=${checkpoint%%:*}
subset=test out=${OUT:-${first%.pt}} previous=''
for word in "$@"; do
    case $word in
    --gen-subset=*) subset=${word#*=} ;;
    --results-path=*) out=${word#*=} ;;
    esac
    case $previous in
    --gen-subset) subset=$word ;;
    --results-path) out=$word ;;
    esac
    previous=$word
done
data=${DATA:-data-bin/$folder}
case $dataset in
iwslt15-*)
    set -- --beam 10 --batch-size 32 "$@"
    reference=$data/raw/$subset.detok.$target tokenized=$data/raw/$subset.$target
    ;;
wmt19)
    set -- --beam 4 --lenpen 0.6 --max-tokens 4096 --post-process sentencepiece "$@"
    reference=$data/raw/$subset.$target tokenized=''
    ;;
multi30k)
    set -- --beam 5 --max-len-a 1.5 --max-len-b 20 --max-tokens 4096 \
        --post-process sentencepiece "$@"
    reference=$data/raw/$subset.$target tokenized=''
    ;;
esac
set -- "$data" --user-dir "$user_dir" --path "$checkpoint" --results-path "$out" \
    --required-batch-size-multiple 1 \
    --task translation --source-lang $source --target-lang $target --gen-subset $subset "$@"

if [ "${DRY_RUN:-0}" = 0 ]; then
    printf '%s\n' "$checkpoint" | tr : '\n' | while read -r file; do
        [ -f "$file" ] || fail "no file CHECKPOINT '$file'; run: scripts/train_nmt.sh $dataset METHOD"
    done
    [ -f "$reference" ] || fail "no $reference; run: scripts/prepare_$folder.sh, or set DATA"
fi
show fairseq-generate "$@"
[ "${DRY_RUN:-0}" = 0 ] || exit 0
"$python" -m fairseq_cli.generate "$@"
set -- "$out/generate-$subset.txt" --reference "$reference"
[ -z "$tokenized" ] || set -- "$@" --tokenized-reference "$tokenized"
run_module fairseq_dpq.cli.score "$@"
