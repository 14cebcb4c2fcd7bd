#!/bin/sh
# Prepare a data set for fairseq; --help lists the flags, docs/datasets.md explains them.
# The interpreter is $PYTHON, else the checkout's .venv, else python3.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    [ -x "$root/.venv/bin/python" ] && python=$root/.venv/bin/python
fi
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("fairseq_dpq") is None)'; then
    PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
fi
exec "$python" -m fairseq_dpq.datasets.wmt19 "$@"
