# The commands of this checkout; each sets up .venv first (once: minutes; afterwards: a second).
#   make TORCH='torch==2.13.0+cu130'   another build of torch (docs/install.md)
#   make PYTHON=/path/to/python3.11    the interpreter that .venv is made with
SHELL := bash
TORCH ?= torch==2.13.0
PYTHON ?=
# What `make demo` compresses: source, or all (one table for source, target and output)
TABLES ?= source
VENV := .venv
LEGACY_VENV := .venv-legacy
# Two test processes with one thread each: more threads slow small models down.
TEST_JOBS ?= 2
PYTEST_ARGS ?=
FUZZ_MINUTES ?= 10
export TORCH PYTHON

BIN := $(VENV)/bin
PYTEST := -m pytest -n $(TEST_JOBS) --dist worksteal $(PYTEST_ARGS)

.PHONY: help setup demo any-model test test-fast test-install test-legacy test-sanitize fuzz lint fix benchmarks clean

help:
	@echo "make demo         train full, DPQ-SX and DPQ-VQ on a generated corpus, compact, translate, compare, report"
	@echo "make any-model    compress a sentence encoder of Hugging Face and measure it (examples/any_model);"
	@echo "                  ARGS='smollm2 DATA': a language model, perplexity against bytes"
	@echo "make test         all tests"
	@echo "make test-fast    the tests without the slow ones: three to four minutes"
	@echo "make test-install the wheel in a fresh environment: train, compact, translate"
	@echo "make fuzz         damaged and forged files to every reader, FUZZ_MINUTES=10"
	@echo "make lint         format check, lint, types and shell scripts"
	@echo "make fix          format, and repair what the linter can"
	@echo "make benchmarks   speed and memory, as ratios within one run"
	@echo "make test-legacy  the tests on Python 3.10, torch 1.12.1, fairseq 0.12.2"
	@echo "make test-sanitize  fuzz the native library under address, undefined-behaviour and thread sanitizers"
	@echo "make clean        remove build products and demo output, keep .venv"

setup:
	@VENV=$(VENV) bash scripts/setup_env.sh

demo: setup
	@bash scripts/demo.sh --tables $(TABLES)

any-model:
	@bash examples/any_model/run.sh $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST)

test-fast: setup
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m "not slow"

test-install: setup
	@PYTHON=$(BIN)/python bash scripts/test_install.sh

fuzz: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -W ignore -m helpers.forging --minutes $(FUZZ_MINUTES)

test-legacy:
	VENV=$(LEGACY_VENV) bash scripts/setup_legacy.sh
	OMP_NUM_THREADS=1 $(LEGACY_VENV)/bin/python $(PYTEST)

test-sanitize:
	python3 tests/native/sanitize.py

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/shellcheck scripts/*.sh examples/*/*.sh .ci/run
	$(BIN)/shellcheck --shell=sh --exclude=SC1091,SC2034,SC2154 recipes/*

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: setup
	@for file in $$(grep -l '__main__' benchmarks/*.py); do \
	  echo "== $$file"; OMP_NUM_THREADS=1 $(BIN)/python $$file || exit 1; done

clean:
	rm -rf build dist demo_out *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find fairseq_dpq experiments tests benchmarks scripts examples -name __pycache__ -type d -prune -exec rm -rf {} +
