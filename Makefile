# The commands for users, developers and CI. `make` lists them.

PYTHON ?= python3
VENV := .venv
# The number of tests that run at once. More than the number of cores, because tests mostly wait for brokers.
WORKERS ?= 4
# pytest-timeout cannot end a test that hangs inside a library, where Python handles no signal. After 1600 s, which is
# longer than any pytest-timeout, faulthandler prints the stacks and ends the worker: the test fails, other tests continue.
STUCK := -o faulthandler_timeout=1600 -o faulthandler_exit_on_timeout=true
BIN := $(VENV)/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# With this variable, each of the several hundred processes that the tests start would compile kconsume again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip --quiet

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo orders migration lakehouse test chaos lint docs check bench dist clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.base ## run a broker and two consumers, kill one with kill -9, and count the results
	@$(BIN)/kconsume demo

orders: $(VENV)/.orders ## an example: three services, killed with kill -9 while orders are placed; checks their tables
	@$(BIN)/python -m examples.orders

migration: $(VENV)/.base ## an example: a plain loop and the same on kconsume, both killed; counts lost and repeated payments
	@$(BIN)/python -m examples.migration

lakehouse: $(VENV)/.lakehouse ## an example: Spark writes clicks to parquet and PostgreSQL, and is killed; counts them and draws a picture
	@$(BIN)/python -m examples.lakehouse

test: $(VENV)/.test ## run every test, on a real Kafka
	@$(BIN)/python -m kconsume.testing.services
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(STUCK)

chaos: $(VENV)/.test ## run the tests with kills, zombies, cut connections and restarts, for longer; prints seeds and counts
	@$(BIN)/python -m kconsume.testing.services
	@KCONSUME_TEST_CHAOS=long $(BIN)/python -m pytest --verbose --capture=no tests/chaos tests/spark

lint: $(VENV)/.test ## run ruff, mypy and the import contracts
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports > /dev/null || $(BIN)/lint-imports

docs: $(VENV)/.docs ## build the documentation into site/; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint ## run lint and the unit tests: run this before each commit
	@$(BIN)/python -m pytest tests/unit

bench: $(VENV)/.test ## run the benchmarks on a real Kafka
	@$(BIN)/python -m benchmarks

dist: $(VENV)/.made ## build the packages for an index: make dist URL=https://the.repository/of/kconsume
	@test -n "$(URL)" || { echo "Give the address of the repository, to which links on the package index lead: make dist URL=https://…" >&2; exit 1; }
	@$(PIP) install build
	@PROJECT_URL=$(URL) $(BIN)/python -m build --outdir dist

clean: ## remove what these commands made in this folder
	@rm -rf $(VENV) build dist site lakehouse.png .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp files are inside the virtual environment, so removing the environment removes them too.

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

# The pip of `python3 -m venv` may be older than 25.1, and an older pip does not know --group. So it is upgraded.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "kconsume needs Python 3.11 or newer, and $(PYTHON) is `$(PYTHON) --version 2>&1`." \
			"Install one and name it: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment." \
			"On Debian and Ubuntu: apt-get install python3-venv; or name another: make PYTHON=…" >&2; exit 1; }
	@$(PIP) install --upgrade 'pip>=25.1'
	@touch $@
