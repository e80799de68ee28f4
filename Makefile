# Everything a developer runs. `make help` lists the targets.
#
#   PYTHON=python3.12 VENV=.venv-3.12   another interpreter, in a virtual environment of its own
#   JOBS=4                              test processes
#   ARGS="--steps 100"                  more arguments for `autoshard train`, pytest or the benchmarks

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=
BENCH ?= dispatch step_ratio state_memory planning_time planning_scale propagate_time
OLD ?= python3.11
NEW ?= python3.12

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c requirements.lock
CPU8 := JAX_PLATFORMS=cpu XLA_FLAGS="$(XLA_FLAGS) --xla_force_host_platform_device_count=8"
RUN_STAMP := $(VENV)/.stamp-run
QUICK_STAMP := $(VENV)/.stamp-quick
DEV_STAMP := $(VENV)/.stamp-dev
DOCS_STAMP := $(VENV)/.stamp-docs

export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1
# Tests start many interpreters. Without bytecode, each of them compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup dev bytecode train test quick test-all parity coverage lint format golden bench bench-plans recipes against screenshots pictures docs lock release clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

setup: $(RUN_STAMP) ## Make the virtual environment with what a run needs.

dev: $(DEV_STAMP) ## The same, and what the tests need.

# Test processes start together. Without these files each of them compiles all tests.
bytecode: $(QUICK_STAMP) ## Compile the package and the tests to bytecode.
	@$(BIN)/python -m pytest -n 0 --collect-only -qq $(ARGS) >/dev/null

train: $(RUN_STAMP) ## Set up, then train the default preset on 8 virtual CPU devices.
	@$(CPU8) $(BIN)/autoshard train --preset quick $(ARGS)

test: lint ## Set up, lint, types, and the tests.
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

quick: $(QUICK_STAMP) ## The tests of the package without lint, long ones and compilers of pods, which are run on one JAX version only.
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not whole and not tpu_compile and not cuda_compile and not browser" --ignore tests/benchmarks $(ARGS)

test-all: lint ## Lint, types, and every test, slow ones included.
	@$(PIP) --no-build-isolation -e '.[gcs,libraries,mlflow,wandb]' gcp-storage-emulator
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "" $(ARGS)

parity: $(DEV_STAMP) ## Pretrained models against transformers on PyTorch (Python 3.11: newer ones get a large build of PyTorch).
	@$(PIP) --no-build-isolation -e '.[parity]'
	@AUTOSHARD_PARITY=required $(BIN)/python -m pytest -n $(JOBS) --dist loadscope -m parity tests/parity/pretrained $(ARGS)

coverage: $(DEV_STAMP) ## The tests with branch coverage, by subpackage: ARGS=... for pytest; BEFORE=FILE compares with an earlier coverage.json.
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --cov=autoshard --cov-branch --cov-report=json:coverage.json --cov-report= $(ARGS)
	@$(BIN)/python scripts/coverage_by_part.py coverage.json $(BEFORE)

lint: $(DEV_STAMP) ## ruff check, ruff format --check, import-linter, pyright.
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports --no-logo --no-cache
	@$(BIN)/lint-imports --no-logo --no-cache --config benchmarks/importlinter.toml
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV_STAMP) ## Let ruff format the code and mend what it can.
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format --quiet

golden: $(DEV_STAMP) ## Keep the benchmark's plans as they are now: ARGS="gpt-1.3b --keep-variant" for some, or without a search of variants.
	@$(CPU8) $(BIN)/python -m tests.golden.refresh $(ARGS)

bench: $(DEV_STAMP) ## Run the benchmarks: BENCH="dispatch step_ratio" for some of them.
	@for name in $(BENCH); do echo "== $$name"; $(CPU8) $(BIN)/python benchmarks/$$name.py || exit 1; done

bench-plans: $(DEV_STAMP) ## Compile the planner's plans and an expert's for pods and compare: ARGS="--quick" for four cases.
	@JAX_PLATFORMS=cpu $(BIN)/python benchmarks/bench_plans.py $(ARGS)

recipes: $(DEV_STAMP) ## Compare plans with step times that others measured on pods: ARGS="--predict-only" compiles nothing.
	@JAX_PLATFORMS=cpu $(BIN)/python benchmarks/recipes.py $(ARGS)

against: $(DEV_STAMP) ## Compare planning, dispatch and propagation with another revision: make against REV=v0.1.0
	@$(BIN)/python benchmarks/against.py --against "$(REV)" $(ARGS)

screenshots: $(DEV_STAMP) ## Renew docs/plan.png, the picture of a plan's page: ARGS=FOLDER for whole pages, dark and narrow too.
	@JAX_PLATFORMS=cpu $(BIN)/python -m scripts.screenshots $(ARGS)

pictures: $(RUN_STAMP) ## Renew docs/pictures, the pictures of plans: ARGS=FOLDER to write them elsewhere.
	@JAX_PLATFORMS=cpu $(BIN)/python -m scripts.plan_pictures $(ARGS)

docs: $(DOCS_STAMP) ## Build the site of docs/ in build/docs: a broken link or a public name without an entry fails.
	@JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -qW --keep-going -E -d build/doctrees docs build/docs
	@echo "the site: build/docs/index.html"

lock: ## Lock the newest versions: make lock OLD=python3.11 NEW=python3.12
	@for python in $(OLD) $(NEW); do rm -rf .venv-lock-$$python; $$python -m venv .venv-lock-$$python || exit 1; \
	  .venv-lock-$$python/bin/python -m pip install -qq --disable-pip-version-check hatchling '.[dev,docs]' || exit 1; \
	  .venv-lock-$$python/bin/python -m pip uninstall -qqy autoshard; done
	@$(PYTHON) scripts/lock.py .venv-lock-$(OLD)/bin/python .venv-lock-$(NEW)/bin/python > requirements.lock.new
	@mv requirements.lock.new requirements.lock; rm -rf .venv-lock-$(OLD) .venv-lock-$(NEW)

release: $(DEV_STAMP) ## Check, test, build and tag a release, with no push: make release VERSION=0.2.0 (RELEASING.md)
	@$(BIN)/python scripts/release.py "$(VERSION)"

clean: ## Remove the virtual environment and caches; runs/ stays.
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis dist build

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no '$(PYTHON)' here: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "make: '$(PYTHON)' is $$($(PYTHON) --version 2>&1); autoshard needs Python 3.11 or newer: make PYTHON=python3.11" >&2; exit 2; }
	@echo "setting up $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv $(VENV)

# The lock constrains versions; pyproject.toml says what is installed. hatchling first, so that the build is locked too.
$(RUN_STAMP): pyproject.toml requirements.lock | $(BIN)/python
	@echo "installing what a run needs (a minute or two, once)"
	@$(PIP) hatchling
	@$(PIP) --no-build-isolation -e .
	@touch $@

$(QUICK_STAMP): $(RUN_STAMP)
	@echo "installing what the quick tests need"
	@$(PIP) --no-build-isolation -e '.[quick]'
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo "installing what the tests need"
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $(QUICK_STAMP) $@

$(DOCS_STAMP): $(RUN_STAMP)
	@echo "installing what the site needs"
	@$(PIP) --no-build-isolation -e '.[docs]'
	@touch $@
