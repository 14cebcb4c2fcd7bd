#!/bin/sh
# Prepare a data set for fairseq; --help lists the flags, docs/datasets.md explains them.
set -eu
. "$(dirname "$0")/python.sh"
run_module fairseq_dpq.datasets.wikitext2 "$@"
