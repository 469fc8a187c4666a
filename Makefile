# Everything a person or CI does with this repository. `make` lists it.

PYTHON ?= python3
VENV := .venv
# Tests wait for brokers more than they compute, so more of them run at once than there are cores.
WORKERS ?= 4
# A test that hangs where no signal is heard, inside a library, is beyond pytest-timeout. Later than any of those, on a
# machine that is not starved, its worker says where it stands and is ended: the test has failed, and the others go on.
STUCK := -o faulthandler_timeout=1600 -o faulthandler_exit_on_timeout=true
BIN := $(VENV)/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where it is set, the many hundred processes that the tests start compile parts of kconsume again and again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip --quiet

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo orders migration lakehouse test chaos lint docs check bench dist clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.base ## see it work: a broker, two consumers, one killed with kill -9; then the counts
	@$(BIN)/kconsume demo

orders: $(VENV)/.orders ## an example: three services, killed with kill -9 while orders come in; then their books
	@$(BIN)/python -m examples.orders

migration: $(VENV)/.base ## an example: a plain loop and the same on kconsume, killed at the same places; then the counts
	@$(BIN)/python -m examples.migration

lakehouse: $(VENV)/.lakehouse ## an example: clicks into parquet and PostgreSQL by Spark, killed with kill -9; then the counts, and a picture
	@$(BIN)/python -m examples.lakehouse

test: $(VENV)/.test ## run every test, on a real Kafka
	@$(BIN)/python -m kconsume.testing.services
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(STUCK)

chaos: $(VENV)/.test ## the faults at length: kills, zombies, cut connections, restarts; seeds and hits are printed
	@$(BIN)/python -m kconsume.testing.services
	@KCONSUME_TEST_CHAOS=long $(BIN)/python -m pytest --verbose --capture=no tests/chaos tests/spark

lint: $(VENV)/.test ## ruff, mypy, and who may import what
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports > /dev/null || $(BIN)/lint-imports

docs: $(VENV)/.docs ## build the documentation into site/; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint ## what to run before a commit: lint and the unit tests
	@$(BIN)/python -m pytest tests/unit

bench: $(VENV)/.test ## measure, on a real Kafka
	@$(BIN)/python -m benchmarks

dist: $(VENV)/.made ## build the packages for an index: make dist URL=https://the.repository/of/kconsume
	@test -n "$(URL)" || { echo "Say where the repository is, so that links work on the index: make dist URL=https://…" >&2; exit 1; }
	@$(PIP) install build
	@PROJECT_URL=$(URL) $(BIN)/python -m build --outdir dist

clean: ## remove what these commands made in this folder
	@rm -rf $(VENV) build dist site lakehouse.png .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are inside the environment, so that removing it removes them.

$(VENV)/.base: $(VENV)/.made pyproject.toml
	@echo "Installing kconsume into $(VENV) …"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.orders: $(VENV)/.made pyproject.toml
	@echo "Installing kconsume and what the example needs (FastAPI, PostgreSQL) into $(VENV) …"
	@$(PIP) install --editable . --group orders
	@touch $@ $(VENV)/.base

$(VENV)/.lakehouse: $(VENV)/.made pyproject.toml
	@echo "Installing kconsume and what the example needs (Spark, Java, PostgreSQL) into $(VENV) …"
	@$(PIP) install --editable . --group lakehouse
	@touch $@ $(VENV)/.base

$(VENV)/.docs: $(VENV)/.made pyproject.toml
	@echo "Installing kconsume and what builds its documentation into $(VENV) …"
	@$(PIP) install --editable '.[postgres,redis]' --group docs
	@touch $@ $(VENV)/.base

$(VENV)/.test: $(VENV)/.made pyproject.toml
	@echo "Installing kconsume, its tests and its linters into $(VENV) …"
	@$(PIP) install --editable . --group test --group lint
	@touch $@ $(VENV)/.base $(VENV)/.orders $(VENV)/.lakehouse

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
