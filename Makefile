# Everything here makes its own environment in .venv; nothing needs to be installed by hand.
#   make PYTHON=python3.12 test     uses another Python for a new environment
#   make WORKERS=8 test             runs the tests in more processes
#   make GPU_PYTHON=python3 test-gpu   uses an environment that is there already, with its torch

PYTHON ?= python3
WORKERS ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
CORE := .venv/.installed-core
DEV := .venv/.installed-dev

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo docs test test-all test-gpu test-witnesses lint types doctests environment clean

help:
	@echo "make demo      compare four methods on digits under strong label skew; writes demo/report.html"
	@echo "make test      style, types, doctests and tests, without the slow ones"
	@echo "make test-all  the same with the slow ones; hundreds of kills, 10,000 spoiled inputs a reader, and docs/reliability.md written from them"
	@echo "make test-gpu  the suite for one CUDA device, where torch finds one; see docs/engines.md"
	@echo "make test-witnesses  methods, aggregators, accountants and partitions against other people's libraries, in the environment .venv-witnesses"
	@echo "make docs      the documentation site in build/docs/html; warnings are errors; in the environment .venv-docs"
	@echo "make lint      style alone        make types  types alone"
	@echo "make clean     remove what the targets above wrote (the environments stay: the folders .venv, .venv-docs and .venv-witnesses)"

demo: $(CORE)
	$(BIN)/remanence demo --out demo
	@echo "The report is demo/report.html: open it in a browser."

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy src

# One thread a process: the tests already use every core they were given, and the number of threads changes the last bits.
doctests test test-all: export OMP_NUM_THREADS = 1

doctests: $(DEV)
	$(BIN)/pytest --quiet --doctest-modules src

test: lint types doctests
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup -m "not slow" tests

# Everything, as often as docs/reliability.md promises; that page is written from what happened, and only if all of it went well.
test-all: export REMANENCE_TRIALS = $(CURDIR)/build/trials
test-all: lint types doctests
	rm -rf $(REMANENCE_TRIALS)
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup tests
	$(BIN)/python tests/trust/page.py $(REMANENCE_TRIALS) docs/reliability.md

# Without a CUDA device it says so and exits with 2.
test-gpu: $(if $(GPU_PYTHON),,$(DEV))
	PYTHONPATH=src:tests:$(PYTHONPATH) $(or $(GPU_PYTHON),$(BIN)/python) -m gpu

# The libraries that this compares with are not needed for anything else, and have an environment of their own.
WITNESSES := .venv-witnesses

test-witnesses: export OMP_NUM_THREADS = 1
test-witnesses: $(WITNESSES)/.installed
	$(WITNESSES)/bin/python -m pytest -rP tests/witnesses

$(WITNESSES)/.installed: pyproject.toml tests/witnesses/requirements.txt
	$(PYTHON) -m venv --clear $(WITNESSES)
	@echo "Installing the libraries to compare with into $(WITNESSES) (the first time this takes some minutes)"
	@$(WITNESSES)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' tests/witnesses/requirements.txt)"
	@$(WITNESSES)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/witnesses/requirements.txt
	@$(WITNESSES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

# Sphinx and its extensions are not needed for anything else, and have an environment of their own, with the exact versions of docs/constraints.txt.
DOCS := .venv-docs
DOCS_PIP := $(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --constraint docs/constraints.txt

docs: export OMP_NUM_THREADS = 1
docs: $(DOCS)/.installed
	$(DOCS)/bin/remanence demo --quiet --out build/docs/demo
	mkdir -p build/docs/extra/demo
	cp build/docs/demo/report.html build/docs/extra/demo/report.html
	$(DOCS)/bin/python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs build/docs/html
	@echo "The site is build/docs/html/index.html: open it in a browser."

$(DOCS)/.installed: pyproject.toml constraints.txt docs/constraints.txt
	$(PYTHON) -m venv --clear $(DOCS)
	@echo "Installing Sphinx and the package into $(DOCS) (the first time this takes some minutes)"
	@$(DOCS_PIP) "$$(grep '^torch==' constraints.txt)"
	@$(DOCS_PIP) --editable ".[docs]"
	@touch $@

# torch comes first and alone, at the version constraints.txt pins: left to choose among versions, pip may fetch gigabytes of CUDA packages.
define install
	@$(BIN)/python -c "" 2>/dev/null || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	@echo "Installing $(1) into .venv (the first time this takes some minutes)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) --editable "$(1)"
endef

environment: $(DEV)

$(CORE): pyproject.toml constraints.txt
	$(call install,.)
	@touch $@

$(DEV): pyproject.toml constraints.txt
	$(call install,.[dev])
	@touch $(CORE) $@

clean:
	rm -rf demo build dist docs/gallery docs/project docs/reference .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
