# Every target sets itself up: on a fresh machine only Python 3.11 is needed.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.krul-installed
ARGS ?=
# Test files run side by side, those that start servers first. Three on two cores: servers wait now and then.
TEST_PROCESSES ?= 3
IN_PARALLEL := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
export HF_HUB_OFFLINE := 1

.PHONY: demo test test-long peer-tests gpu-check check-sglang mooncake chromium docs lint format clean

demo: $(STAMP)
	$(BIN)/python -m demo $(ARGS)

# Everything that guards a promise. One test alone is faster without workers: .venv/bin/python -m pytest FILE::TEST
test: $(STAMP)
	$(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

# The same promises with more rounds, cases and settings: about three quarters of an hour.
test-long: $(STAMP)
	$(BIN)/python -m pytest $(IN_PARALLEL) -m long $(ARGS)

# SGLang's own server tests against servers with krul. ARGS="-m quick" takes under three minutes, and
# ARGS=--without-krul asks servers of SGLang alone.
peer-tests: $(STAMP)
	$(BIN)/python -m pytest -v tests/peers/kits.py $(ARGS)

# On a machine with an NVIDIA GPU: docs/gpu.md. ARGS="--long" takes hours, ARGS="--stages kernels" needs no SGLang.
gpu-check: $(STAMP)
	$(BIN)/python -m tests.gpu $(ARGS)

# What another release of SGLang would break: make check-sglang VERSION=0.5.24
check-sglang: $(STAMP)
	VENV="$(VENV)" scripts/check_sglang.sh "$(VERSION)"

# The site of docs/ into build/site; with VERSION=0.1 that version of it, and `latest`, into the branch gh-pages.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(STAMP)
	$(BIN)/mkdocs build --strict $(ARGS)
	$(if $(VERSION),PATH="$(abspath $(BIN)):$$PATH" mike deploy --update-aliases $(VERSION) latest)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# System packages of the Mooncake tier. Only this and `make chromium` need root; without them tests are skipped.
mooncake: $(STAMP)
	$(BIN)/python -c 'import mooncake.store' 2>/dev/null || { scripts/install_packages.sh libibverbs1 librdmacm1 libnuma1 \
		ibverbs-providers && $(BIN)/python -c 'import mooncake.store'; }

# The browser that the tests of the daemon's web page use.
chromium:
	command -v chromium >/dev/null || scripts/install_packages.sh chromium fonts-dejavu-core

# An existing environment is kept; it is brought up to date when the project's requirements change.
$(STAMP): pyproject.toml
	PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup.sh
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
