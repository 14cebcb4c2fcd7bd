#!/bin/sh
# Train a translation model of the paper: prints the fairseq command, then runs it.
set -eu

usage() {
    cat <<'TEXT'
usage: scripts/train_nmt.sh DATASET METHOD [fairseq-train flags...]
  DATASET  iwslt15-en-vi | iwslt15-vi-en  (scripts/prepare_iwslt15.sh makes data-bin/iwslt15)
           wmt19                          (scripts/prepare_wmt19.sh makes data-bin/wmt19)
           multi30k                       (scripts/prepare_multi30k.sh makes data-bin/multi30k)
  METHOD   full | sx | vq                 (plain table, DPQ-SX, DPQ-VQ)
Flags after METHOD come last and win, e.g. --max-update 100 or --dpq-K 16; give such a variant a
SAVE_DIR of its own, for the command goes on from the checkpoint it finds there.
Environment:
  DATA      binarised data               (default: data-bin/iwslt15, wmt19 or multi30k)
  SAVE_DIR  checkpoints                  (default: checkpoints/DATASET_METHOD)
  WORKERS   how many processes train     (default: WORLD_SIZE as torchrun sets it, else
                                          --distributed-world-size, else all GPUs; --cpu: 1)
  BATCH     what an update sees: sentences, for multi30k tokens    (default: the recipe's)
  MICRO     what a worker takes at once at most, in the same unit  (default: the recipe's);
            --update-freq makes up the rest
  DRY_RUN   1: print the command, do not run it
  PYTHON    the interpreter              (default: the checkout's .venv, else python3)
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
[ $# -ge 2 ] || { usage >&2; exit 2; }
dataset=$1 method=$2
shift 2

. "$(dirname "$0")/python.sh"
. "$(dirname "$0")/launch.sh"

case $dataset in
iwslt15-en-vi) folder=iwslt15 source=en target=vi ;;
iwslt15-vi-en) folder=iwslt15 source=vi target=en ;;
wmt19 | multi30k) folder=$dataset source=en target=de ;;
*) fail "DATASET '$dataset' is unknown; choose iwslt15-en-vi, iwslt15-vi-en, wmt19 or multi30k" ;;
esac
case $method in
full | sx | vq) ;;
*) fail "METHOD '$method' is unknown; choose full, sx or vq" ;;
esac

data=${DATA:-data-bin/$folder}
if [ "${DRY_RUN:-0}" = 0 ] && [ ! -f "$data/dict.$source.txt" ]; then
    fail "no dict.$source.txt in DATA '$data'; run: scripts/prepare_$folder.sh"
fi

own_batch=''
for word in "$@"; do
    case $word in
    --batch-size* | --max-sentences* | --max-tokens* | --update-freq*) own_batch=1 ;;
    esac
done
count_workers "$@"
# shellcheck disable=SC2086 # a flag and its number, or nothing
set -- $start_flags "$@"

# What an update sees, what a worker takes at once, K and D. floor: a batch holds the longest pair.
unit=sentences K='' D=''
case $dataset-$method in
iwslt15-*-sx) K=32 D=32 ;;
iwslt15-*-vq)
    # The paper adds the error up over the 512 dimensions. By the mean, SGD at rate 1 would move
    # the 128 x 128 centroids by 2 / (128 * 512) of their error in an update: not at all.
    K=128 D=128
    set -- --dpq-reg-weight 512 "$@"
    ;;
wmt19-sx | wmt19-vq) K=32 D=128 ;;
multi30k-sx)
    # Queries and keys of 2 dimensions would tell few codes apart; of 8 they are as large as
    # needed, and a compact checkpoint has neither.
    K=8 D=64
    set -- --dpq-key-dim 8 "$@"
    ;;
multi30k-vq)
    # Of the settings tried, the one with the best valid perplexity. The commitment is a mean over
    # 128 dimensions: at 30 its pull on a query is about as strong as the loss's own.
    K=8 D=64
    set -- --dpq-no-normalize --dpq-ema-decay 0.99 --dpq-commitment 30 "$@"
    ;;
esac
case $dataset in
iwslt15-*) batch=128 micro=128 length=100 floor=2048 ;;
wmt19) batch=2048 micro=128 length=64 floor=1024 ;;
multi30k) batch=2048 micro=1024 unit=tokens floor=128 ;;
esac
batch=${BATCH:-$batch} micro=${MICRO:-$micro}
number BATCH "$batch"
number MICRO "$micro"
[ $((batch % workers)) -eq 0 ] ||
    fail "$counted do not divide BATCH $batch ($unit); take another number (WORKERS)," \
        "or set BATCH to a multiple of $workers"
share=$((batch / workers))
freq=$(((share + micro - 1) / micro))
while [ $((share % freq)) -ne 0 ]; do freq=$((freq + 1)); done
most=$micro micro=$((share / freq))
if [ $freq -gt 1 ] && [ $((2 * micro)) -lt "$most" ]; then
    fail "BATCH $batch over $workers worker(s) does not split into equal parts near MICRO $most" \
        "($unit); take another BATCH, e.g. $(((batch + most * workers - 1) / (most * workers) * most * workers))"
fi
if [ $unit = tokens ] && [ $micro -lt $floor ]; then
    fail "$micro $unit for a worker at once do not hold the longest pair; at least $floor: fewer" \
        "workers, or a larger BATCH"
fi

if [ $unit = tokens ]; then
    set -- --max-tokens $micro --update-freq $freq "$@"
else
    # Long sentences come in smaller batches, so that memory has a bound.
    tokens=$((length * micro))
    [ $tokens -ge $floor ] || tokens=$floor
    set -- --batch-size $micro --max-tokens $tokens --update-freq $freq "$@"
fi

case $dataset in
iwslt15-*)
    # Loss per sentence, as in the paper's code: lr 1.0 and clip 5 belong to it. From 8,000 updates
    # on the rate is halved every 1,000.
    set -- --arch lstm --encoder-bidirectional --encoder-layers 2 --decoder-layers 2 \
        --encoder-embed-dim 512 --encoder-hidden-size 512 \
        --decoder-embed-dim 512 --decoder-hidden-size 512 --decoder-out-embed-dim 512 \
        --dropout 0.2 --criterion cross_entropy --sentence-avg \
        --optimizer sgd --lr 1.0 --clip-norm 5 --lr-scheduler manual --epoch2lr '{"1":1.0}' \
        --update2lr '{"0":1.0,"9000":0.5,"10000":0.25,"11000":0.125}' \
        --max-update 12000 "$@"
    ;;
wmt19)
    set -- --arch transformer_wmt_en_de --share-decoder-input-output-embed \
        --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
        --optimizer sm3 --momentum 0.9 --lr 0.1 \
        --lr-scheduler quadratic_warmup --warmup-updates 10000 \
        --max-update 250000 --save-interval-updates 5000 --keep-interval-updates 1 "$@"
    ;;
multi30k)
    set -- --arch transformer --share-decoder-input-output-embed \
        --encoder-layers 4 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256 \
        --encoder-attention-heads 4 \
        --decoder-layers 4 --decoder-embed-dim 128 --decoder-ffn-embed-dim 256 \
        --decoder-attention-heads 4 --dropout 0.2 \
        --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
        --optimizer adam --adam-betas '(0.9, 0.98)' --lr 0.003 --lr-scheduler polynomial_decay \
        --warmup-updates 300 --total-num-update 3000 --max-update 3000 "$@"
    ;;
esac
if [ $method != full ]; then
    set -- --dpq-K $K --dpq-D $D --dpq-method "$method" "$@"
fi
set -- "$data" --user-dir "$user_dir" --save-dir \
    "${SAVE_DIR:-checkpoints/${dataset}_$method}" --no-epoch-checkpoints \
    --log-format simple --log-interval 100 --required-batch-size-multiple 1 \
    --task translation --source-lang $source --target-lang $target "$@"

if [ "${RANK:-${SLURM_PROCID:-0}}" = 0 ]; then
    show fairseq-train "$@"
    [ -n "$own_batch" ] ||
        echo "train_nmt.sh: $batch $unit an update = $workers worker(s) x $micro x $freq" >&2
fi
[ "${DRY_RUN:-0}" = 0 ] || exit 0
exec "$python" -m fairseq_cli.train "$@"
