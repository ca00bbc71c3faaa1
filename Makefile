# Every target sets itself up: on a fresh machine only Python 3.11 is needed.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.krul-installed
ARGS ?=
export HF_HUB_OFFLINE := 1

.PHONY: demo test gpu-check lint format clean

demo: $(STAMP)
	$(BIN)/krul-sglang demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

# On a machine with an NVIDIA GPU: docs/gpu.md. ARGS="--long" takes hours, ARGS="--stages a" needs no SGLang.
gpu-check: $(STAMP)
	$(BIN)/python -m tests.gpu $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# An existing environment is kept; it is brought up to date when the project's requirements change.
$(STAMP): pyproject.toml
	PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup.sh
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
