#!/bin/sh
# train_lm.sh DATASET SIZE METHOD: train.sh DATASET_SIZE METHOD. Sourced, so that messages name this.
set -eu
if [ $# -ge 2 ]; then
    recipe=$1_$2
    shift 2
    set -- "$recipe" "$@"
fi
. "$(dirname "$0")/train.sh"
