#!/usr/bin/env bash
# Runs the demo in the environment that make sets up; arguments go to experiments.demo.run.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${VENV:-.venv}/bin/python"
[ -x "$python" ] || { echo "demo: no $python; run: make demo" >&2; exit 1; }
exec "$python" -W ignore -m experiments.demo.run --out demo_out "$@"
