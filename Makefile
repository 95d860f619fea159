# One command each for people and for CI. `make setup` is what the others begin with.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

.PHONY: help setup run test lint types unit format clean

help:            ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

setup: $(STAMP)  ## make .venv and install kvquay with its development tools

# torch first and alone, pinned: whatever else asks for "torch" is then satisfied already.
$(STAMP): pyproject.toml setup.py constraints.txt $(shell find backends -name '*.c')
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

run: setup       ## run the embedded default: two replicas of two workers, verified
	$(PY) launch.py

test: lint types unit ## lint, type-check and run the tests

lint: setup      ## ruff, format and check
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: setup     ## mypy, strict
	$(PY) -m mypy

# A launch waits more than it computes, so files go side by side; what looks at all of the machine,
# or at how long things take, comes after them and alone.
unit: setup      ## pytest
	$(PY) -m pytest -n 2 --dist loadfile -m "not alone"
	$(PY) -m pytest -m alone

format: setup    ## rewrite the code as the linter wants it
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:           ## remove the environment and every generated file
	rm -rf $(VENV) runs multirun build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find backends -name '*.so' -delete
