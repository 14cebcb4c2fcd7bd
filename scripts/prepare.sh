#!/bin/sh
# Prepare a data set for fairseq; NAME --help lists the flags, docs/datasets.md explains them.
# NAME is the data set of a recipe and a module of fairseq_dpq/datasets.
set -eu
. "$(dirname "$0")/python.sh"
names=$(sed -n 's/^data=//p' "$root"/recipes/* | sort -u | tr '\n' ' ')
usage="usage: scripts/prepare.sh NAME [flags...]; NAME is one of: $names"
case "${1:-}" in
'')
    echo "$usage" >&2
    exit 2
    ;;
-h | --help)
    echo "$usage"
    exit 0
    ;;
esac
case " $names" in
*" $1 "*) ;;
*)
    echo "prepare.sh: NAME '$1' is unknown; choose one of: $names" >&2
    exit 2
    ;;
esac
name=$1
shift
run_module "fairseq_dpq.datasets.$name" "$@"
