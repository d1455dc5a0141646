# Each target works as the first and only command after a clone: it makes .venv and installs what it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-all lint type format bench clean
.DEFAULT_GOAL := setup

setup: $(READY)

$(READY): requirements.txt setup.py
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed; found " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

demo: $(READY)  ## segment a brain MRI template, verify the result, draw it: demo-output/tissue.png
	$(BIN)/beam-inference demo

test: $(READY)  ## everything but what is slow; under ten minutes on two cores
	$(BIN)/python -m pytest

test-all: $(READY)  ## the slow tests too
	$(BIN)/python -m pytest -m "not gpu"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure, and write benchmarks/results
	$(BIN)/python -m benchmarks.bench

clean:
	rm -rf $(VENV) build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
