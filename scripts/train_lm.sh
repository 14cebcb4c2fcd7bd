#!/bin/sh
# Train a language model of the paper: prints the fairseq command, then runs it.
set -eu

usage() {
    cat <<'TEXT'
usage: scripts/train_lm.sh DATASET SIZE METHOD [fairseq-train flags...]
  DATASET  ptb | wikitext2                       (scripts/prepare_DATASET.sh makes data-bin/DATASET)
  SIZE     small | medium | large | transformer  (LSTMs of Zaremba et al., 2014; transformer_lm)
  METHOD   full | sx | vq                        (plain table, DPQ-SX, DPQ-VQ)
Flags after METHOD come last and win, e.g. --max-epoch 2 or --dpq-K 16; give such a variant a
SAVE_DIR of its own, for the command goes on from the checkpoint it finds there.
Environment:
  DATA      binarised data               (default: data-bin/DATASET)
  SAVE_DIR  checkpoints                  (default: checkpoints/DATASET_SIZE_METHOD)
  WORKERS   how many processes train     (default: WORLD_SIZE as torchrun sets it, else
                                          --distributed-world-size, else all GPUs; --cpu: 1)
  SHARE     0: no --dpq-share-subspaces, which all LSTM rows of the paper have
  DRY_RUN   1: print the command, do not run it
  PYTHON    the interpreter              (default: the checkout's .venv, else python3)
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
[ $# -ge 3 ] || { usage >&2; exit 2; }
dataset=$1 size=$2 method=$3
shift 3

. "$(dirname "$0")/python.sh"
. "$(dirname "$0")/launch.sh"

case $dataset in
ptb | wikitext2) ;;
*) fail "DATASET '$dataset' is unknown; choose ptb or wikitext2" ;;
esac
case $size in
small | medium | large | transformer) ;;
*) fail "SIZE '$size' is unknown; choose small, medium, large or transformer" ;;
esac
case $method in
full | sx | vq) ;;
*) fail "METHOD '$method' is unknown; choose full, sx or vq" ;;
esac

# The paper's batch is 20 lanes whatever the number of workers; fairseq counts them per worker.
count_workers "$@"
# shellcheck disable=SC2086 # a flag and its number, or nothing
set -- $start_flags "$@"

# K and D; sharing is on in all rows of the paper.
K='' D='' share=--dpq-share-subspaces
case $size-$method in
small-sx) K=8 D=25 ;;
small-vq) K=32 D=25 ;;
medium-sx)
    K=32 D=50
    if [ "$dataset" = wikitext2 ]; then K=128; fi
    ;;
medium-vq) K=128 D=50 ;;
large-sx | large-vq) K=16 D=50 ;;
transformer-sx | transformer-vq) K=32 D=64 share='' ;;
esac
case ${SHARE:-1} in
0) share='' ;;
1) ;;
*) fail "SHARE '$SHARE' is neither 0 nor 1" ;;
esac

case $size in
small | medium | large)
    lanes=20
    [ $((lanes % workers)) -eq 0 ] ||
        fail "$counted do not divide $lanes lanes; set WORKERS to 1, 2, 4, 5, 10 or 20"
    # steps, clip, epochs at lr 1.0 plus one, factor per epoch from there, epochs
    case $size in
    small) steps=20 clip=3 anneal=5 shrink=0.5 epochs=15 ;;
    medium) steps=35 clip=5 anneal=7 shrink=0.8 epochs=35 ;;
    large)
        steps=35 clip=5 anneal=15 shrink=0.87 epochs=35
        if [ $method = full ]; then clip=10; fi
        ;;
    esac
    set -- --task stateful_lm --arch "zaremba_lstm_lm_$size" \
        --tokens-per-sample $steps --batch-size $((lanes / workers)) \
        --optimizer sgd --lr 1.0 --clip-norm $clip \
        --lr-scheduler fixed --force-anneal $anneal --lr-shrink $shrink --max-epoch $epochs "$@"
    ;;
transformer)
    # 32 blocks of 128 tokens an update, whatever the number of workers.
    [ $((32 % workers)) -eq 0 ] ||
        fail "$counted do not divide 32 blocks; set WORKERS to 1, 2, 4, 8, 16 or 32"
    set -- --task language_modeling --arch transformer_lm \
        --decoder-embed-dim 512 --decoder-input-dim 512 --decoder-output-dim 512 \
        --decoder-ffn-embed-dim 2048 --decoder-layers 6 --decoder-attention-heads 8 \
        --dropout 0.3 --attention-dropout 0.1 \
        --tokens-per-sample 128 --sample-break-mode none --batch-size $((32 / workers)) \
        --required-batch-size-multiple 1 \
        --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 1.0 \
        --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 2000 --warmup-init-lr 1e-07 \
        --max-epoch 30 "$@"
    ;;
esac
if [ $method != full ]; then
    # shellcheck disable=SC2086 # $share is a flag or nothing
    set -- --dpq-K $K --dpq-D $D $share --dpq-method "$method" "$@"
fi

data=${DATA:-data-bin/$dataset}
if [ "${DRY_RUN:-0}" = 0 ] && [ ! -f "$data/dict.txt" ]; then
    fail "no dict.txt in DATA '$data'; run: scripts/prepare_$dataset.sh"
fi
set -- "$data" --user-dir "$user_dir" --save-dir \
    "${SAVE_DIR:-checkpoints/${dataset}_${size}_$method}" --no-epoch-checkpoints \
    --log-format simple --log-interval 200 "$@"

if [ "${RANK:-${SLURM_PROCID:-0}}" = 0 ]; then
    show fairseq-train "$@"
fi
[ "${DRY_RUN:-0}" = 0 ] || exit 0
exec "$python" -m fairseq_cli.train "$@"
