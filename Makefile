# `make quickstart` and `make test` do everything on a fresh machine: they install into .venv and run there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Two processes: one runs all tests of the real stack, the other the unit tests meanwhile (tests/conftest.py).
TWO := -n 2

.PHONY: quickstart test test-all lint docs bench clean

quickstart: $(INSTALLED)
	$(BIN)/python examples/quickstart

test: $(INSTALLED)
	$(BIN)/python -m pytest $(TWO)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest $(TWO) -m "slow or not slow"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What needs no GPU; benchmarks/gpu.py needs one.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/adaptation.py
	$(BIN)/python benchmarks/delay.py
	$(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/simulation.py

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py
	$(BIN)/python -m sphinx -W --keep-going -q -n -c docs . docs/_build

# In three steps: torch first, for its CPU build must be there before anything asks for torch; then what OpenRLHF and
# vLLM import; then those two without their dependencies (requirements/cpu-no-deps.txt says why).
$(INSTALLED): pyproject.toml requirements/cpu-no-deps.txt
	@echo "installing into $(VENV): torch, OpenRLHF, Ray, DeepSpeed, vLLM; a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable ".[cpu,test]"
	$(BIN)/pip install --quiet --no-deps --requirement requirements/cpu-no-deps.txt
	touch $@

clean:
	rm -rf $(VENV) runs
