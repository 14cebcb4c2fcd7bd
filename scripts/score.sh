#!/bin/sh
# Evaluate a checkpoint with its recipe's metric: prints the fairseq command, runs it, and prints the
# scores as JSON.
set -eu

usage() {
    cat <<'TEXT'
usage: scripts/score.sh RECIPE CHECKPOINT [flags...]
  RECIPE      as for scripts/train.sh: fairseq-generate and BLEU for translation, fairseq-eval-lm and
              perplexity for language models, fairseq-validate for masked language models and
              classifiers, fairseq-dpq-squad for SQuAD
  CHECKPOINT  of scripts/train.sh, fairseq-dpq-compact or fairseq-dpq-quantize; A.pt:B.pt is an
              ensemble
Flags after CHECKPOINT come last and win, e.g. --gen-subset valid or --beam 1.
Environment:
  DATA     binarised data          (default: data-bin/NAME, as scripts/prepare.sh NAME makes it)
  OUT      folder of translations  (default: the first CHECKPOINT without .pt)
  DRY_RUN  1: print the command, do not run it
  PYTHON   the interpreter         (default: the checkout's .venv, else python3)
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
[ $# -ge 2 ] || { usage >&2; exit 2; }
. "$(dirname "$0")/python.sh"
. "$(dirname "$0")/launch.sh"
. "$(dirname "$0")/recipe.sh"
read_recipe "$1" full
checkpoint=$2
shift 2

first=${checkpoint%%:*}
out=${OUT:-${first%.pt}} previous=''
for word in "$@"; do
    case $word in
    --gen-subset=* | --valid-subset=* | --subset=*) subset=${word#*=} ;;
    --results-path=*) out=${word#*=} ;;
    esac
    case $previous in
    --gen-subset | --valid-subset | --subset) subset=$word ;;
    --results-path) out=$word ;;
    esac
    previous=$word
done
folder=${DATA:-data-bin/$data}
on_subset() { # PATH: with @subset filled in
    [ -z "$1" ] || echo "$folder/${1%%@subset*}$subset${1#*@subset}"
}
eval "set -- $score" '"$@"'
case $metric in
bleu)
    program=generate needs_file=$(on_subset "$reference") tokenized=$(on_subset "$tokenized")
    set -- "$folder" --user-dir "$user_dir" --path "$checkpoint" --results-path "$out" \
        --required-batch-size-multiple 1 --task translation \
        --source-lang "$source" --target-lang "$target" --gen-subset "$subset" "$@"
    ;;
perplexity)
    program=eval-lm needs_file=$folder/$needs
    set -- "$folder" --user-dir "$user_dir" --path "$checkpoint" --gen-subset "$subset" "$@"
    ;;
validate)
    program=validate needs_file=$(on_subset "$scored")
    set -- "$folder" --user-dir "$user_dir" --path "$checkpoint" --valid-subset "$subset" \
        --required-batch-size-multiple 1 "$@"
    ;;
squad)
    program=dpq-squad needs_file=$(on_subset @subset.examples.jsonl)
    set -- "$checkpoint" --data "$folder" --subset "$subset" "$@"
    ;;
*) fail "recipes/$recipe.conf: metric '$metric' is none of bleu, perplexity, validate and squad" ;;
esac

if [ "${DRY_RUN:-0}" = 0 ]; then
    printf '%s\n' "$checkpoint" | tr : '\n' | while read -r file; do
        need_checkpoint CHECKPOINT "$file" "scripts/train.sh $recipe METHOD"
    done
    [ "$metric" != validate ] || [ ! -f "$folder/$needs" ] || [ -f "$needs_file" ] ||
        fail "no split '$subset' in DATA '$folder'; choose another one by --valid-subset"
    [ -f "$needs_file" ] || fail "no $needs_file; run: scripts/prepare.sh $data, or set DATA"
fi
if [ "${DRY_RUN:-0}" != 0 ]; then
    show "fairseq-$program" "$@"
    exit 0
fi
show "fairseq-$program" "$@" >&2 # the scores alone are on standard output, as JSON
[ "$metric" != squad ] || run_module fairseq_dpq.cli.squad --json "$@"
[ "$metric" = bleu ] || run_module experiments.score "$metric" -- "$@"
# Flags of experiments.score come before --, those of fairseq-generate behind it.
[ -z "$tokenized" ] || set -- --tokenized-reference "$tokenized" -- "$@"
[ -n "$tokenized" ] || set -- -- "$@"
run_module experiments.score bleu --output "$out/generate-$subset.txt" --reference "$needs_file" "$@"
