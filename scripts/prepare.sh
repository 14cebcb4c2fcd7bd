#!/bin/sh
# Prepare a data set for fairseq; NAME --help lists the flags, docs/datasets.md explains them.
set -eu
. "$(dirname "$0")/python.sh"
run_module experiments.datasets "$@"
