#!/bin/sh
# Train the model of a recipe: prints the fairseq command, then runs it.
set -eu

usage() {
    # shellcheck disable=SC2046 # names are words
    cat <<TEXT
usage: scripts/train.sh RECIPE METHOD [fairseq-train flags...]
  RECIPE   $(one_of $(recipe_names) | fold -s -w 80 | sed 's/ *$//; 2,$s/^/           /')
  METHOD   full (plain table), sx, vq (DPQ-SX, DPQ-VQ), or another one of the recipe
Flags after METHOD come last and win, e.g. --max-epoch 2 or --dpq-K 16. Give such a variant its own
SAVE_DIR: the command resumes from the checkpoint that it finds there.
Environment:
  DATA      binarised data               (default: data-bin/NAME, as scripts/prepare.sh NAME makes it)
  SAVE_DIR  checkpoints                  (default: checkpoints/RECIPE_METHOD)
  WORKERS   how many processes train     (default: WORLD_SIZE as torchrun sets it, else
                                          --distributed-world-size, else all GPUs; --cpu: 1)
  BATCH     what an update sees, in the recipe's unit              (default: the recipe's)
  MICRO     what a worker takes at once at most, in the same unit  (default: the recipe's);
            --update-freq makes up the rest. Not with lanes or blocks
  SHARE     0: without the recipe's --dpq-share-subspaces
  BERT, PRETRAINED  fine-tuning: base (default) or small, and the pre-trained checkpoint
            (default: checkpoint_best.pt of recipe bert_base or bert_small with METHOD)
  DRY_RUN   1: print the command, do not run it
  PYTHON    the interpreter              (default: the checkout's .venv, else python3)
TEXT
}

. "$(dirname "$0")/python.sh"
. "$(dirname "$0")/launch.sh"
. "$(dirname "$0")/recipe.sh"
. "$(dirname "$0")/batch.sh"

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
[ $# -ge 2 ] || { usage >&2; exit 2; }
read_recipe "$1" "$2"
shift 2
find_method
case $flags in
*@method*@batch*) ;;
*) fail "recipes/$recipe.conf: flags must hold @method, then @batch" ;;
esac

case ${SHARE:-1} in
0) method_flags=$(echo "$method_flags" | sed 's/--dpq-share-subspaces//') ;;
1) ;;
*) fail "SHARE '$SHARE' is neither 0 nor 1" ;;
esac

own_batch=''
for word in "$@"; do
    case $word in
    --batch-size* | --max-sentences* | --max-tokens* | --update-freq*) own_batch=1 ;;
    --finetune-from-model* | --restore-file*) pretrained='' ;; # another start was chosen
    esac
done
count_workers "$@"
split_batch
folder=${DATA:-data-bin/$data}
if [ "${DRY_RUN:-0}" = 0 ] && [ ! -f "$folder/$needs" ]; then
    fail "no $needs in DATA '$folder'; run: scripts/prepare.sh $data"
fi
save_dir=${SAVE_DIR:-checkpoints/${recipe}_$method}
# A training that goes on from its own last checkpoint does not need the first one any more.
if [ "${DRY_RUN:-0}" = 0 ] && [ -n "$pretrained" ] && [ ! -f "$save_dir/checkpoint_last.pt" ]; then
    need_checkpoint PRETRAINED "$pretrained" "scripts/train.sh $pretraining $method, or set it"
fi

# eval: words such as '(0.9, 0.98)' are quoted within the recipe's flags.
flags=$(echo "$flags" | tr '\n' ' ')
head=${flags%%@method*} rest=${flags#*@method}
eval "set -- $head $method_flags ${rest%%@batch*} $batch_flags ${rest#*@batch} $last_flags" \
    "$start_flags" '"$@"'
set -- "$folder" --user-dir "$user_dir" --save-dir "$save_dir" \
    --no-epoch-checkpoints --log-format simple "$@"

if [ "${RANK:-${SLURM_PROCID:-0}}" = 0 ]; then
    show fairseq-train "$@"
    [ -n "$own_batch" ] || [ -z "$batch_line" ] || echo "$script: $batch_line" >&2
fi
[ "${DRY_RUN:-0}" = 0 ] || exit 0
exec "$python" -m fairseq_cli.train "$@"
