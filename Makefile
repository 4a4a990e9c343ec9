# `make quickstart` and `make test` do everything on a fresh machine: they install into .venv and run there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The two stacks have files in common, so each has a folder of its own.
VENV_GPU := .venv-gpu
INSTALLED_GPU := $(VENV_GPU)/.installed
# The first import compiles what tools/install.sh did not, and keeps that unless this variable forbids it.
unexport PYTHONDONTWRITEBYTECODE
# SIGTERM to make also ends what a command has started. A shell in between would not pass it on.
STOPPABLE := exec $(PYTHON) tools/stoppable.py
# Two processes: each runs one part of the tests of the real stack, then they share the unit tests (tests/conftest.py).
TWO := -n 2

.PHONY: quickstart test test-all test-research lint docs bench install-gpu flash-attn lock clean

quickstart: $(INSTALLED)
	@$(STOPPABLE) $(BIN)/python examples/quickstart

test: $(INSTALLED)
	@$(STOPPABLE) $(BIN)/python -m pytest $(TWO)

test-all: $(INSTALLED)
	@$(STOPPABLE) $(BIN)/python -m pytest $(TWO) -m "slow or not slow" --hypothesis-profile=thorough

# After a change in research/, and before a release.
test-research: $(INSTALLED)
	@$(STOPPABLE) $(BIN)/python -m pytest -m "slow or not slow" research/tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What needs no GPU; research/benchmarks/gpu.py needs one.
bench: $(INSTALLED)
	$(BIN)/python research/benchmarks/adaptation.py
	$(BIN)/python research/benchmarks/math_verifiers.py
	$(BIN)/python research/benchmarks/steps.py
	$(BIN)/python research/benchmarks/trainer_process.py

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py
	$(BIN)/python -m sphinx -W --keep-going -q -n -c docs . docs/_build

$(INSTALLED): pyproject.toml requirements/cpu.lock.txt requirements/cpu-no-deps.txt tools/install.sh
	@echo "installing into $(VENV): torch, OpenRLHF, Ray, DeepSpeed, vLLM; a few minutes the first time"
	@$(STOPPABLE) $(PYTHON) -m venv $(VENV)
	@$(STOPPABLE) tools/install.sh $(VENV)
	touch $@

# On a machine with GPUs: what OpenRLHF and vLLM import, then these two without their dependencies.
$(INSTALLED_GPU): pyproject.toml requirements/cuda.lock.txt requirements/cuda-no-deps.txt
	@echo "installing into $(VENV_GPU): torch, OpenRLHF, Ray, DeepSpeed, vLLM; a few minutes the first time"
	$(PYTHON) -m venv $(VENV_GPU)
	$(VENV_GPU)/bin/pip install --quiet --constraint requirements/cuda.lock.txt --editable ".[cuda]"
	$(VENV_GPU)/bin/pip install --quiet --no-deps --requirement requirements/cuda-no-deps.txt
	touch $@

install-gpu: $(INSTALLED_GPU)
	@echo "installed; now: source $(VENV_GPU)/bin/activate"

# Optional: it compiles for minutes or hours, and needs the CUDA toolkit (docs/dependencies.md).
flash-attn: $(INSTALLED_GPU)
	$(VENV_GPU)/bin/pip install --quiet wheel
	$(VENV_GPU)/bin/pip install --no-build-isolation flash-attn==2.8.3

# The lock files, after a change of a dependency; `make lock UPGRADE=--upgrade` takes the newest versions.
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet uv
	PATH="$(CURDIR)/build/lock/bin:$$PATH" tools/lock.sh $(UPGRADE)

clean:
	rm -rf $(VENV) $(VENV_GPU) build runs
