# Every target sets up what it needs: a virtual environment in .venv, once, and again when pyproject.toml or this file changes.
#   make demo                                                   train a small model on this machine's CPU
#   make test                                                   all tests that need no GPU
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu  a torch without CUDA: some 3 GB less to download
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
COMPOSE := docker-compose==1.29.2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test check generate baseline compare clean

help:
	@echo "make demo      train a small model on this machine's CPU, under two minutes (ARGS='run.num_steps=100')"
	@echo "make test      unit, integration and end-to-end tests (ARGS='-k conductor')"
	@echo "make check     ruff, ruff format, mypy --strict, generated code against its sources"
	@echo "make generate  write protos/generated/ from protos/*.proto, and docs/configuration.md"
	@echo "make baseline  the demo's task in one plain process"
	@echo "make compare   the demo beside that plain process"
	@echo "make clean     remove .venv and caches; outputs/ and data/ stay"

setup: $(READY)

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit("Offbeat needs Python 3.11 or newer; say make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "==> making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "==> installing $(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@echo "==> installing offbeat[train,dev]"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev]'
	@echo "==> fetching the schema that deploy/compose.yaml is held to"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .cache/compose $(COMPOSE)
	@touch $@

demo: $(READY)
	@echo "==> offbeat demo"
	@$(BIN)/offbeat demo $(ARGS)

test: $(READY)
	@echo "==> pytest"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not gpu' $(ARGS)

check: $(READY)
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> mypy (strict)"
	@$(BIN)/mypy .
	@echo "==> generated code"
	@$(BIN)/python protos/generate.py --check
	@$(BIN)/python docs/generate.py --check

generate: $(READY)
	@echo "==> writing generated code"
	@$(BIN)/python protos/generate.py
	@$(BIN)/python docs/generate.py

baseline: $(READY)
	@echo "==> the plain loop"
	@$(BIN)/python -m deploy.recipes.plain_loop --model outputs/baseline/model $(ARGS)

compare: $(READY)
	@echo "==> offbeat bench demo"
	@$(BIN)/offbeat bench demo $(ARGS)

clean:
	@echo "==> removing $(VENV) and caches"
	@rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
