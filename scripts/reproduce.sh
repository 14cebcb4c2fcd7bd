#!/bin/sh
# Make a table of the paper with our figures beside its own; --help lists the flags.
set -eu
. "$(dirname "$0")/python.sh"
cd "$root"
export PYTHON="$python"
run_module experiments.reproduce.run "$@"
