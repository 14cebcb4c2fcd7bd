#!/usr/bin/env bash
# Build .venv-legacy: the official fairseq 0.12.2 with torch 1.12.1 on Python 3.10, and this package
# in it, to run the tests on the older stack. Takes about two minutes; run again to bring it up to date.
#
#   scripts/setup_legacy.sh && .venv-legacy/bin/python -m pytest tests
#
# PYTHON310  the Python 3.10 to use (default: python3.10)
# VENV       where to put the environment (default: .venv-legacy in the checkout)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON310:-python3.10}
venv=${VENV:-$root/.venv-legacy}

if ! version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); then
    echo "setup_legacy: PYTHON310=$python does not run; set PYTHON310 to a Python 3.10" >&2
    exit 1
fi
if [ "$version" != 3.10 ]; then
    echo "setup_legacy: PYTHON310=$python is Python $version; set PYTHON310 to a Python 3.10" >&2
    exit 1
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

echo "== pip that still accepts omegaconf 2.0's metadata"
pip install -q "pip<24.1" "setuptools<70" wheel

echo "== torch 1.12.1 (its wheel needs nothing but typing_extensions)"
pip install -q --no-deps torch==1.12.1 typing_extensions
pip install -q "numpy<1.24" cython

echo "== fairseq 0.12.2 (built in isolation: a build that sees torch wants a file the archive lacks)"
pip install -q --no-deps fairseq==0.12.2
pip install -q cffi "hydra-core>=1.0.7,<1.1" "omegaconf<2.1" regex "sacrebleu>=2" tqdm bitarray \
    tensorboardX

echo "== what the package and its tests use"
pip install -q pytest pytest-xdist sentencepiece "safetensors<0.5" packaging tokenizers "matplotlib<3.9"
pip install -q --no-build-isolation -e "$root"
# fairseq looks for --user-dir NAME beside its own package, where an editable install is not.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
ln -sfn "$root/fairseq_dpq" "$site/fairseq_dpq"

"$venv/bin/python" - <<'PY'
import sys, torch, fairseq, hydra, numpy
import fairseq.data.data_utils_fast  # the compiled part
print("Python %d.%d," % sys.version_info[:2], "torch", torch.__version__, "fairseq", fairseq.__version__,
      "hydra", hydra.__version__, "numpy", numpy.__version__)
PY
