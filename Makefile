# Set-up and everyday commands. `make train` and `make test` need Python 3.11 or newer, nothing else.
#
#   make train ARGS="--train.steps 50"     make test ARGS="tests/test_mesh.py -v"
#   make train PYTHON=/path/to/python3.13  make train EXTRAS=tb,viz,cuda13   (on NVIDIA GPUs)

VENV := .venv
EXTRAS := tb,viz
ARGS :=
PYTHON :=

BIN := $(VENV)/bin
# Tests run in as many processes as there are cores, up to four. The tests of a file run in the same
# process and share what it compiled. ARGS=-n0: all in this process.
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadfile
# What another version of Python and JAX is tried with: layers, commands, pages.
SMOKE := tests/layers tests/config tests/commands tests/project tests/generate \
    tests/test_main.py tests/test_verify.py tests/test_comms.py tests/test_memory.py \
    tests/test_mesh.py tests/test_profile.py
# A stamp marks a complete installation of pyproject.toml's packages. Every installation removes the
# stamps first, so that one which was interrupted starts again from nothing.
TRAIN_STAMP := $(VENV)/.installed-train-$(EXTRAS)
DEV_STAMP := $(VENV)/.installed-dev

# An environment whose Python does not run (it was moved, or its Python is gone) has no valid stamp.
ifeq ($(shell $(BIN)/python -c 'import sys; print(sys.prefix != sys.base_prefix)' 2>/dev/null),)
.PHONY: $(TRAIN_STAMP) $(DEV_STAMP)
endif

# $(call install,EXTRAS): makes a fresh environment unless a valid one exists, installs the packages.
define install
	@if ! ls $(VENV)/.installed-* >/dev/null 2>&1 || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    python=$$($(FIND_PYTHON)) && \
	    echo "Setting up $(VENV) with $$python ..." && \
	    "$$python" -m venv --clear $(VENV); \
	fi
	@rm -f $(VENV)/.installed-*
	@$(call pip,$(1))
endef

# $(call pip,EXTRAS): on a terminal pip shows its progress; elsewhere only what goes wrong.
define pip
echo "Installing jaxptd with jax, flax, optax, orbax and the extras $(1) into $(VENV); a few minutes the first time ..." && \
{ [ -t 1 ] || quiet=--quiet; } && \
$(BIN)/python -m pip install $$quiet --disable-pip-version-check -e '.[$(1)]'
endef

# Prints the first suitable Python, else one line with what is missing. Tested versions come first.
define FIND_PYTHON
found=; \
for python in $(or $(PYTHON),python3.13 python3.12 python3.11 python3.14 python3 python); do \
    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
    found="$$python"; \
    "$$python" -c 'import venv, ensurepip' 2>/dev/null && echo "$$python" && exit 0; \
done; \
if [ -n "$$found" ]; then \
    echo "error: $$found cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; \
else \
    echo "error: no Python 3.11 or newer $(if $(PYTHON),at PYTHON=$(PYTHON),on PATH); install one, or name one: make PYTHON=/path/to/python3.13" >&2; \
fi; exit 1
endef

.PHONY: help train test smoke slow proof notebooks tutorials lint docs clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/make \1: \2/p' $(MAKEFILE_LIST)

train: $(TRAIN_STAMP)  ## train a small GPT: configs/quickstart.yaml, with ARGS="--section.field value ..."
	$(BIN)/python -m jaxptd.train --config configs/quickstart.yaml $(ARGS)

test: $(DEV_STAMP)  ## run the tests, with ARGS for pytest
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

smoke: $(DEV_STAMP)  ## run the contracts, the commands and the documentation only
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(SMOKE) $(ARGS)

slow: $(DEV_STAMP)  ## run the slow tests
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "slow and not gpu" $(ARGS)

proof: $(DEV_STAMP)  ## verify a thousand drawn configs on all cores; the same command goes on
	$(BIN)/python -m jaxptd verify --random 1000 --jobs "$$(getconf _NPROCESSORS_ONLN)" $(ARGS)

notebooks: $(DEV_STAMP)  ## run the notebooks, and write them with their output beside the .py files
	$(BIN)/jupytext --quiet --to ipynb --execute notebooks/*.py

tutorials: $(DEV_STAMP)  ## run the notebooks, and write them as pages of the documentation
	$(BIN)/python docs/tutorial_pages.py $(ARGS)

lint: $(DEV_STAMP)  ## check style, types and which module imports which
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports --no-logo --cache-dir .import_linter_cache

docs: $(DEV_STAMP)  ## build the documentation into docs/_build
	@$(call pip,docs)
	$(BIN)/python -m sphinx -W -b html docs docs/_build/html

clean:  ## remove the environment, caches and built documentation; runs/ stays
	rm -rf .venv .venv-* .jax_cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache build dist docs/_build *.egg-info

# The development environment includes what training needs, so it has both stamps.
$(DEV_STAMP): pyproject.toml
	$(call install,dev)
	@touch $@ $(TRAIN_STAMP)

$(TRAIN_STAMP): pyproject.toml
	$(call install,$(EXTRAS))
	@touch $@
