# make demo   a real language model continues Python code, with and without speculation
# make test   ruff, mypy and pytest
#
# Both build .venv on first use. torch comes first because its wheel decides between CPU and GPU:
#   make demo                                                     PyPI's torch: with CUDA on Linux
#   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cpu"      without CUDA, a tenth of the size
#   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cu130"    for one CUDA version
#   make demo PYTHON=python3.13                                   another interpreter

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= --max-new-tokens 96 --dtype fp32

# The embedded models are too small for two threads to pay, and threads that share a core wait for one another.
export OMP_NUM_THREADS ?= 1
# Everything here runs offline; a look-up at the hub would only wait.
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test lint types unit docs clean

demo: $(VENV)/.installed
	$(BIN)/hf-specdec generate --spec-method prompt_lookup $(DEMO) </dev/null
	$(BIN)/hf-specdec generate --spec-method prompt_lookup $(DEMO) --compare </dev/null

test: lint types unit

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(VENV)/.installed
	$(BIN)/mypy

unit: $(VENV)/.installed
	$(BIN)/pytest

docs: $(VENV)/.installed
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
