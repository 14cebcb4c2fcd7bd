# shellcheck shell=sh disable=SC2034,SC2154 # variables are shared with the script that sources it
# Sourced by the scripts beside it: sets root, the checkout; python, the interpreter ($PYTHON, else
# the checkout's .venv, else python3); user_dir, what --user-dir is given.
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    [ -x "$root/.venv/bin/python" ] && python=$root/.venv/bin/python
fi
user_dir=$root/fairseq_dpq
[ "$PWD" = "$root" ] && user_dir=fairseq_dpq

run_module() { # MODULE [ARGUMENTS...]: run it from the checkout, which has more than the package
    PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
    module=$1
    shift
    exec "$python" -m "$module" "$@"
}
