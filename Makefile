# Two commands for a newcomer: `make serve` and `make test`. Both set up .venv themselves.
#
#   make serve                      serve the checkpoint that ships on 127.0.0.1:8000
#   make serve MODEL=DIR PORT=9000  serve another checkpoint
#   make test                       lint, types, import contracts, the suite, wheel contents
#   make e2e                        real clients in a loop against our server (installs them)
#   make measure                    every GPU figure of README and all GPU tests, on all GPUs there are
#
# Variables:
#   PYTHON      interpreter the environment is made from (>= 3.11)
#   INDEX       your own package index, for everything
#   TORCH_INDEX your own index for torch alone (a CPU build is far smaller than the default one)
#   WORKERS     processes that run the suite; one a core, at most 6, each with 700 MB of memory
#   ARGS        more flags for `bathyal serve`, pytest or measure, names of clients for e2e

PYTHON ?= python3
VENV ?= .venv
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
INDEX ?=
TORCH_INDEX ?= $(INDEX)
WORKERS ?= auto
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INDEX_FLAG := $(if $(INDEX),--index-url $(INDEX))
TORCH_INDEX_FLAG := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
# Without a GPU one tested torch is pinned; with one, the newest that pyproject admits and the kernels' packages.
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -m1 -o GPU)
TORCH := $(if $(GPU),torch,torch==2.13.0)
EXTRA := $(if $(GPU),[cuda])

.DEFAULT_GOAL := help
.PHONY: help serve test lint types contracts suite e2e measure clean

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

# dependency groups need pip >= 25.1; an older one comes with many Pythons
$(BIN)/.pip:
	$(PYTHON) -c 'import sys; sys.exit("Python >= 3.11 is needed, this is %d.%d: make PYTHON=..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(INDEX_FLAG) 'pip>=25.1'
	touch $@

$(BIN)/.run: $(BIN)/.pip pyproject.toml
	$(PIP) install --quiet $(TORCH_INDEX_FLAG) $(TORCH)
	$(PIP) install --quiet $(INDEX_FLAG) -e '.$(EXTRA)'
	touch $@

$(BIN)/.dev: $(BIN)/.run pyproject.toml
	$(PIP) install --quiet $(INDEX_FLAG) --group dev
	touch $@

serve: $(BIN)/.run
	$(BIN)/bathyal serve --host $(HOST) --port $(PORT) $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: lint types contracts suite

lint: $(BIN)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.dev
	$(BIN)/mypy

contracts: $(BIN)/.dev
	$(BIN)/lint-imports

# A file is one worker's: its tests share what they load. Files go out in the order in which one
# process would run them, since the longest do not have the most tests.
suite: $(BIN)/.dev
	$(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 6 --dist loadfile --no-loadscope-reorder $(ARGS)

e2e: $(BIN)/.dev
	$(BIN)/python -m e2e.run $(ARGS)

measure: $(BIN)/.dev
	$(BIN)/python -m bench.measure $(ARGS)

clean:
	rm -rf $(VENV) e2e/.env dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
