# SPDX-License-Identifier: Apache-2.0
# make demo    an answer from the model that ships with the project
# make test    the whole test suite
# make check   lint, types, layers and the fast tests: before every commit
# make exhaustive   the same properties over thousands of cases: takes long
#
# Settings: PYTHON (3.11 to 3.13), VENV, TORCH (what to install as torch), PROMPT, ARGS (for pytest).

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
PROMPT ?= Emma was
ARGS   ?=

DEMO := --max-tokens 96 --temperature 0.6 --seed 7 --speculate 3
BIN  := $(VENV)/bin
EXTRAS := .[server,structured]
PIP  := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
# Tests that need neither a trained model nor a long run. The rest of tests/program runs whole
# engines for minutes.
FAST := tests/architecture tests/host tests/graph tests/ops \
        tests/program/test_letters.py tests/program/test_closed_form.py
# Several threads on a model this small wait for one another longer than they work.
ONE_THREAD := OMP_NUM_THREADS=1

# $(call step,what is being done,command): one line on standard error, with the seconds it took.
define step
@printf '%-58s' "$(1) ..." >&2; begin=$$(date +%s); \
if $(2); then echo " $$(( $$(date +%s) - begin )) s" >&2; else echo " failed" >&2; exit 1; fi
endef

.DEFAULT_GOAL := help
.PHONY: help demo test exhaustive check lint fast format clean
.DELETE_ON_ERROR:

help:
	@sed -n '2,7s/^#[ ]\{0,1\}//p' Makefile

demo: $(VENV)/.installed
	@printf '\n$$ %s\n' '$(BIN)/freewheel generate demo --prompt "$(PROMPT)" $(DEMO)' >&2
	@$(BIN)/freewheel generate demo --prompt "$(PROMPT)" $(DEMO)

test: $(VENV)/.installed-test
	@$(ONE_THREAD) $(BIN)/python -m pytest $(ARGS)

exhaustive: $(VENV)/.installed-test
	@$(ONE_THREAD) $(BIN)/python -m pytest -m exhaustive $(ARGS)

check: lint fast

lint: $(VENV)/.installed-test
	@$(BIN)/ruff format --check || { echo "Run: make format" >&2; exit 1; }
	@$(BIN)/ruff check
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports --no-logo

fast: $(VENV)/.installed-test
	@$(ONE_THREAD) $(BIN)/python -m pytest -q -m "not slow and not gpu and not exhaustive" $(FAST) $(ARGS)

format: $(VENV)/.installed-test
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests train benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	    echo "Freewheel needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make virtual environments: its ensurepip is missing." >&2; \
	    echo "On Debian and Ubuntu the package python3-venv brings it." >&2; exit 1; }
	$(call step,Making a virtual environment in $(VENV),$(PYTHON) -m venv $(VENV))

# torch comes first and by itself: a range would let pip pick a CUDA build of several gigabytes.
$(VENV)/.torch: $(VENV)/pyvenv.cfg
	$(call step,Installing $(TORCH) (the large one),$(PIP) install "$(TORCH)")
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(call step,Installing freewheel,$(PIP) install -e "$(EXTRAS)")
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	$(call step,Installing what the tests and checks need,$(PIP) install -e ".[test]")
	@touch $@
