#!/usr/bin/env bash
# Creates or repairs .venv: torch, fairseq, pinned requirements, this checkout. make calls it before
# everything else; when nothing changed it returns within a second.
#
# Environment: PYTHON (interpreter for .venv; if not given, a working .venv is kept), VENV
# (default .venv), TORCH (default torch==2.13.0; pip arguments, so that a CUDA or CPU build can be named),
# MAX_JOBS (compiler processes), and pip's own PIP_*.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
DEFAULT_TORCH="torch==2.13.0"
TORCH="${TORCH:-$DEFAULT_TORCH}"
VENV="${VENV:-.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
STAMPS="$VENV/.setup"
STEPS=6
step_no=0
child=""

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

sha() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -c1-32; }

# A child runs in its own process group: an interrupt must also reach the compilers that pip starts.
stop_child() {
  trap - INT TERM HUP
  if [ -n "$child" ]; then
    kill -TERM -- "-$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
  fi
  printf '\nsetup: interrupted; the next make takes it up again\n' >&2
  exit 130
}
trap stop_child INT TERM HUP

# usable PYTHON -> 0 when it is 3.11 or later, can make a virtual environment and compile against itself
usable() {
  "$1" - <<'PY' >/dev/null 2>&1
import ensurepip, os, sys, sysconfig, venv
assert sys.version_info >= (3, 11)
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
PY
}

# base PYTHON -> the interpreter below it: a virtual environment has that of its maker. Never one in
# $VENV, which is what an activated shell finds first and what make_venv is about to remove.
base() {
  "$1" - "$VENV" 2>/dev/null <<'PY'
import os, sys
venv = os.path.join(os.path.realpath(sys.argv[1]), "")
path = getattr(sys, "_base_executable", None) or sys.executable
for path in path, os.path.realpath(path):
    if not os.path.join(os.path.realpath(os.path.dirname(path)), "").startswith(venv):
        print(path)
        break
else:
    sys.exit(1)
PY
}

# same PYTHON PYTHON -> 0 when both have the same interpreter below them
same() {
  local code='import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))'
  local first second
  first="$("$1" -c "$code" 2>/dev/null)" && second="$("$2" -c "$code" 2>/dev/null)" && [ "$first" = "$second" ]
}

find_python() {
  local candidate path found
  if [ -n "${PYTHON:-}" ]; then
    if ! { found="$(base "$PYTHON")" && usable "$found"; }; then
      die "PYTHON=$PYTHON is not a Python 3.11 or later with venv, pip and C headers" \
        "(on Debian and Ubuntu: python3.11, python3.11-venv, python3.11-dev)"
    fi
    echo "$found"
    return
  fi
  for candidate in python3.11 python3 python3.12 python3.13 python; do
    while IFS= read -r path; do
      if found="$(base "$path")" && usable "$found"; then echo "$found"; return; fi
    done < <(type -aP "$candidate")
  done
  die "no Python 3.11 or later with venv, pip and C headers found; name one with make PYTHON=/path/to/python3.11" \
    "(on Debian and Ubuntu: python3.11, python3.11-venv, python3.11-dev)"
}

# run TITLE LOG COMMAND...: runs it, its output to LOG, and shows the time as it passes
run() {
  local title="$1" log="$2" start=$SECONDS shown=0 code=0 passed
  shift 2
  printf 'setup: %s\n' "$title"
  set -m
  "$@" >"$log" 2>&1 </dev/null &
  child=$!
  set +m
  while kill -0 "$child" 2>/dev/null; do
    sleep 0.5
    passed=$((SECONDS - start))
    if [ -t 1 ]; then
      printf '\rsetup:   %4d s' "$passed"
    elif [ $((passed - shown)) -ge 30 ]; then
      printf 'setup:   %4d s\n' "$passed"
      shown=$passed
    fi
  done
  wait "$child" || code=$?
  child=""
  [ ! -t 1 ] || printf '\r'
  if [ "$code" != 0 ]; then
    tail -n 40 "$log" >&2
    die "failed after $((SECONDS - start)) s: $title (whole output: $log)"
  fi
  printf 'setup:   done in %d s\n' "$((SECONDS - start))"
}

# pip writes INSTALLER and RECORD last. If they are missing, an installation was interrupted: without its
# metadata pip treats the package as absent and reinstalls it. Folders called ~* are left behind by pip.
repair() {
  local info
  for info in "$VENV"/lib/python*/site-packages/*.dist-info; do
    if [ -d "$info" ] && { [ ! -s "$info/INSTALLER" ] || [ ! -s "$info/RECORD" ]; }; then
      say "repairing: ${info##*/} was left half installed"
      rm -rf "$info"
    fi
  done
  rm -rf "$VENV"/lib/python*/site-packages/~*
}

# step NAME TITLE KEY COMMAND...: runs the command unless its stamp holds the same key. Each key has
# the previous one in it: a change in one step repeats the later ones (fairseq links against torch).
chain=""
step() {
  local name="$1" title="$2" key="$3"
  shift 3
  step_no=$((step_no + 1))
  chain="$(printf '%s\n%s\n' "$chain" "$key" | sha)"
  if [ -e "$STAMPS/$name" ] && [ "$(cat "$STAMPS/$name")" = "$chain" ]; then return; fi
  rm -f "$STAMPS/$name"
  if [ -e "$STAMPS/running" ]; then repair; fi
  : >"$STAMPS/running"
  run "[$step_no/$STEPS] $title" "$STAMPS/$name.log" "$@"
  rm -f "$STAMPS/running"
  printf '%s\n' "$chain" >"$STAMPS/$name.part"
  mv "$STAMPS/$name.part" "$STAMPS/$name"
}

pip_install() { "$VENV/bin/python" -m pip install --no-input "$@"; }

make_venv() { rm -rf "$VENV" && "$python" -m venv "$VENV"; }

# pip may have cached a wheel that was compiled against another torch or numpy: if it cannot be imported,
# it is recompiled. It is built in the environment itself, because an isolated build downloads a second
# torch. Never the wheel of the index: the one for Python 3.12 was linked against an older torch.
install_fairseq() {
  local install=(--no-build-isolation --no-binary fairseq-fixed --no-deps --force-reinstall)
  install+=(-r requirements/fairseq.txt)
  pip_install "${install[@]}" || return
  check_fairseq || { pip_install --no-cache-dir "${install[@]}" && check_fairseq; }
}

check_fairseq() {
  (cd / && "$VENV/bin/python" -W ignore -c "import torch, fairseq.libbleu, fairseq.libbase, fairseq.libnat
import fairseq.data.data_utils_fast, fairseq.data.token_block_utils_fast")
}

# fairseq looks for --user-dir NAME as a path, then next to its own package. An editable install is not
# there, so a link to this checkout is added; the editable install provides the commands and metadata.
install_package() {
  pip_install --no-deps --no-build-isolation --editable . || return
  local site
  site="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || return
  "$VENV/bin/python" - "$PWD/fairseq_dpq" "$site/fairseq_dpq" <<'PY'
import os, sys
target, link = sys.argv[1:]
if os.path.lexists(link):
    os.unlink(link)
os.symlink(os.path.relpath(target, os.path.dirname(os.path.realpath(link))), link)
PY
}

check_all() {
  (cd / && "$VENV/bin/python" -W ignore -c "import torch, numpy, fairseq, hydra, omegaconf, sacrebleu
import matplotlib, pytest, safetensors, sentencepiece, tensorboard, xdist")
}

install_and_check() { install_package && check_all; }

# Without a C compiler this says so and goes on: PyTorch does the same, more slowly.
build_native() { "$VENV/bin/python" fairseq_dpq/native/build.py; }

# One set-up at a time. The lock is held by every child: it is free when all have ended. The file is
# opened to write, because NFS has no exclusive locks on files opened to read.
lock_python="$(command -v python3 || command -v python)" || die "no python3 found"
lock() {
  "$lock_python" - "$1" 2>&1 <<'PY'
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | (fcntl.LOCK_NB if sys.argv[1] == "try" else 0))
except BlockingIOError:
    sys.exit(75)
except OSError as error:
    sys.exit(str(error))
PY
}
lock_code=0
if { exec 9>>.setup.lock; } 2>/dev/null; then
  lock_error="$(lock try)" || lock_code=$?
  if [ "$lock_code" = 75 ]; then
    say "another set-up of this checkout is running; waiting for it"
    lock_code=0
    lock_error="$(lock wait)" || lock_code=$?
  fi
else
  lock_code=1 lock_error="cannot write it"
fi
[ "$lock_code" = 0 ] || say "warning: .setup.lock: cannot be locked ($lock_error); do not start a second make"

# The environment itself: recreated if it is incomplete or was moved, if its Python is gone, or if PYTHON
# names another one. Without PYTHON any Python is accepted.
broken=""
stamp="$(cat "$STAMPS/venv" 2>/dev/null)" || stamp=""
case "$stamp" in
  "$VENV" | "$VENV "*) ;; # older stamps went on with PYTHON
  *) broken="is incomplete or belongs elsewhere" ;;
esac
if [ -z "$broken" ] && ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
  broken="has no Python with pip that runs"
fi
if [ -z "$broken" ] && [ -n "${PYTHON:-}" ] && ! same "$PYTHON" "$VENV/bin/python"; then
  broken="was made with another Python than $PYTHON"
fi
if [ -n "$broken" ]; then
  python="$(find_python)"
  command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null ||
    die "no C++ compiler found (c++ or g++); fairseq needs one (on Debian and Ubuntu: build-essential)"
  case "${VENV##*/}" in
    .venv*) ;;
    *) [ ! -e "$VENV" ] || [ -e "$VENV/pyvenv.cfg" ] || die "VENV=$VENV exists and is not a virtual environment" ;;
  esac
  [ ! -e "$VENV" ] || say "$VENV $broken: recreating it"
  log="$(mktemp)"
  run "creating $VENV with $("$python" --version)" "$log" make_venv
  mkdir -p "$STAMPS"
  mv "$log" "$STAMPS/venv.log"
  stamp=""
fi
[ "$stamp" = "$VENV" ] || printf '%s\n' "$VENV" >"$STAMPS/venv"

torch_pins=()
if [ "$TORCH" = "$DEFAULT_TORCH" ]; then torch_pins=(-c requirements/torch.txt); fi
if [ -z "${MAX_JOBS:-}" ]; then MAX_JOBS="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)"; fi
export MAX_JOBS

# TORCH is split into words on purpose: it may hold several pip arguments.
# shellcheck disable=SC2086
step torch "$TORCH and the build tools" "$TORCH $(cat requirements/torch.txt requirements/build.txt)" \
  pip_install $TORCH -r requirements/build.txt ${torch_pins[@]+"${torch_pins[@]}"}
printf '%s\n' "$TORCH" >"$STAMPS/TORCH" # to see which build it is
torch_chain="$chain"
step run "run-time requirements" "$(cat requirements/run.txt)" \
  pip_install -r requirements/run.txt -c requirements/build.txt
chain="$torch_chain" # a change of other requirements does not recompile fairseq
step fairseq "fairseq: compiling its C++ parts, 3 to 4 minutes, once" "$(cat requirements/fairseq.txt)" \
  install_fairseq
step dev "test and lint tools" "$(cat requirements/dev.txt)" \
  pip_install -r requirements/dev.txt -c requirements/build.txt
step package "this checkout, and a check of the whole" "$PWD $(cat setup.py fairseq_dpq/version.py)" \
  install_and_check
native_sources="$(cat fairseq_dpq/native/build.py fairseq_dpq/native/*.[ch] | sha)"
[ -e fairseq_dpq/native/libdpq.so ] || rm -f "$STAMPS/native"
step native "the native library" "$native_sources" build_native
