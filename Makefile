# Every target sets itself up: on a fresh machine only Python 3.11 is needed.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.krul-installed
ARGS ?=
export HF_HUB_OFFLINE := 1

.PHONY: demo test lint format clean

demo: $(STAMP)
	$(BIN)/krul-sglang demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

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
