# Everything a person or CI does with this repository. `make` lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := $(BIN)/python -m pip --quiet

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test lint check bench clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.base ## see it work: a broker, two consumers, one killed with kill -9; then the counts
	@$(BIN)/kconsume demo

test: $(VENV)/.test ## run every test, on a real Kafka
	@$(BIN)/python -m kconsume.testing.services
	@$(BIN)/python -m pytest

lint: $(VENV)/.test ## ruff and mypy
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy --no-error-summary

check: lint ## what to run before a commit: lint and the unit tests
	@$(BIN)/python -m pytest tests/unit

bench: $(VENV)/.test ## measure, on a real Kafka
	@$(BIN)/python -m benchmarks

clean: ## remove what these commands made in this folder
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are inside the environment, so that removing it removes them.

$(VENV)/.base: $(VENV)/.made pyproject.toml
	@echo "Installing kconsume into $(VENV) …"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml
	@echo "Installing kconsume, its tests and its linters into $(VENV) …"
	@$(PIP) install --editable . --group test --group lint
	@touch $@ $(VENV)/.base

# Not `python3 -m venv` alone: its pip may be older than 25.1, which does not know --group.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "kconsume needs Python 3.11 or newer, and $(PYTHON) is `$(PYTHON) --version 2>&1`." \
			"Install one and name it: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment." \
			"On Debian and Ubuntu: apt-get install python3-venv; or name another: make PYTHON=…" >&2; exit 1; }
	@$(PIP) install --upgrade 'pip>=25.1'
	@touch $@
