#!/usr/bin/env bash
# Proves the installation: builds the wheel, installs it into a fresh environment and, from a folder
# outside the checkout, trains a toy model, compacts it and translates with both checkpoints.
#
# torch and the compiled fairseq come from pip's cache where `make setup` has put them there; without
# the cache this takes as long as the first set-up (docs/install.md).
# Environment: PYTHON (default: that of .venv, else python3), TORCH (default torch==2.13.0), TMPDIR.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TORCH=${TORCH:-torch==2.13.0}
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; fi
fi
work=$(mktemp -d "${TMPDIR:-/tmp}/fairseq-dpq-install.XXXXXX")
trap 'rm -rf "$work"' EXIT
# The checkout must not be what is imported, nor this shell's environment what is used.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
export OMP_NUM_THREADS=1

step() { # TITLE COMMAND...: its output is shown only if it fails
    local title=$1 start=$SECONDS
    shift
    if ! "$@" >"$work/log" 2>&1; then
        tail -n 40 "$work/log" >&2
        echo "test-install: failed: $title" >&2
        exit 1
    fi
    echo "test-install: $title: $((SECONDS - start)) s"
}

venv=$work/venv
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
cd "$root"
step "fresh environment" "$python" -m venv "$venv"
pins=()
if [ "$TORCH" = torch==2.13.0 ]; then pins=(-c requirements/torch.txt); fi
# shellcheck disable=SC2086 # TORCH may hold several pip arguments
step "$TORCH" pip install $TORCH -r requirements/build.txt ${pins[@]+"${pins[@]}"}
step "run-time requirements" pip install -r requirements/run.txt -c requirements/build.txt
step "fairseq" pip install --no-build-isolation --no-binary fairseq-fixed --no-deps \
  -r requirements/fairseq.txt
# A copy, so that the build leaves nothing in the checkout and takes nothing from an earlier one.
mkdir "$work/source"
# Without __pycache__, which a test run beside this one may be writing to.
tar -cf - --exclude=__pycache__ setup.py pyproject.toml README.md MANIFEST.in fairseq_dpq |
    tar -xf - -C "$work/source"
step "wheel" pip wheel --no-deps --no-build-isolation --wheel-dir "$work/dist" "$work/source"
step "package" pip install --no-deps "$work"/dist/fairseq_dpq-*.whl

mkdir "$work/run"
cd "$work/run"
PATH=$venv/bin:$PATH
"$venv/bin/python" - <<'PY'
import random
from pathlib import Path

import fairseq_dpq

assert "site-packages" in Path(fairseq_dpq.__file__).parts, fairseq_dpq.__file__
draw = random.Random(1)
for split, lines in (("train", 300), ("valid", 20), ("test", 20)):
    rows = [[str(draw.randrange(40)) for _ in range(draw.randint(3, 9))] for _ in range(lines)]
    Path(f"{split}.de").write_text("".join(" ".join(reversed(row)) + "\n" for row in rows))
    Path(f"{split}.en").write_text("".join(" ".join(row) + "\n" for row in rows))
PY
step "fairseq-preprocess" fairseq-preprocess -s en -t de --trainpref train --validpref valid \
    --testpref test --destdir bin
step "fairseq-train" fairseq-train bin --user-dir fairseq_dpq --cpu --save-dir out \
    --arch transformer --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 32 \
    --decoder-embed-dim 32 --encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64 \
    --encoder-attention-heads 2 --decoder-attention-heads 2 --dpq-K 8 --dpq-D 8 --dpq-method sx \
    --optimizer adam --lr 0.005 --max-tokens 400 --max-epoch 3 --required-batch-size-multiple 1 \
    --no-epoch-checkpoints --num-workers 0 --log-format simple
step "fairseq-dpq-compact" fairseq-dpq-compact out/checkpoint_last.pt out/compact.pt
step "fairseq-dpq-report" fairseq-dpq-report out/checkpoint_last.pt out/compact.pt --out report
[ -s report/report.html ] || { echo "test-install: no report" >&2; exit 1; }
for name in checkpoint_last compact; do
    step "fairseq-generate, $name" fairseq-generate bin --user-dir fairseq_dpq --cpu \
        --path "out/$name.pt" --required-batch-size-multiple 1 --num-workers 0 --results-path "$name"
    grep '^H-' "$name/generate-test.txt" >"$name.txt"
done
[ "$(wc -l <compact.txt)" -eq 20 ] || { echo "test-install: not 20 translations" >&2; exit 1; }
cmp checkpoint_last.txt compact.txt || { echo "test-install: the outputs differ" >&2; exit 1; }
echo "test-install: passed in $SECONDS s"
