# make demo   fine-tune a small real model on real conversations (docs/quickstart.md)
# make test   lint, types and the whole test suite
# make docs   write docs/recipe.md anew, from the sections of a recipe
# make coverage   write docs/coverage.md anew: architectures of transformers on each layout, beside one process; takes minutes
# make gpu-check  fine-tune a 1B and an 8B shape on one GPU, under five minutes (docs/performance.md)
# make lint   ruff, import contracts and mypy alone
# make clean  remove the environment, caches and build leftovers; keeps runs/ and downloaded assets
#
# All of them first make an environment in .venv, if it is missing or older than pyproject.toml.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || command -v python)
VENV ?= .venv
# Pinned, and installed first: a looser requirement can take a CUDA build of several GB where a CPU build would do.
# Another build: make TORCH="torch==2.13.0 --index-url ..." ; a torch that is in the environment already is kept.
TORCH ?= torch==2.13.0

ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
RUN := $(BIN)/python
INSTALLED := $(VENV)/.installed

.PHONY: demo test docs coverage gpu-check lint clean

demo: $(INSTALLED)
	$(RUN) examples/demo.py

test: lint
	$(RUN) -m pytest

docs: $(INSTALLED)
	$(RUN) docs/generate.py

coverage: $(INSTALLED)
	$(RUN) docs/coverage.py

gpu-check: $(INSTALLED)
	$(RUN) benchmarks/gpu_check.py

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(BIN)/lint-imports
	$(RUN) -m mypy

$(INSTALLED): pyproject.toml
	$(RUN) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv $(VENV)
	$(RUN) -c "import torch" 2>/dev/null || $(RUN) -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	$(RUN) -c "import pathlib; pathlib.Path('$(INSTALLED)').touch()"

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
