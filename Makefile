# Everything runs in a virtual environment that is made on first use; `make` alone lists the targets.

PYTHON ?= python3
RANKS  ?= 8
JOBS   ?= 4
ARGS   ?=
COST   ?= $(if $(ARGS),.pytest_cache/test_cost.txt,tests/test_cost.txt)

# Hypothesis' own plugin for pytest takes time of each of thousands of tests, and tells nothing that a failure does not.
HARNESS := --with-mpi --jobs $(JOBS) -p no:hypothesispytest

VENV := .venv
BIN  := $(VENV)/bin

# The environment stands alone, whatever the caller's shell has set, and its mpiexec is the first one found.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE := 1
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help train test test-cost core-alone lint figures lines docs bench soak cuda-compile clean distclean
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  ARGS="..." goes through to the program: make train RANKS=4 ARGS="--mesh data=2,model=2 --steps 100"'

train: $(VENV)/installed-mpich  ## train a language model on 8 ranks, or RANKS=n
	$(BIN)/mpiexec -n $(RANKS) $(BIN)/python -m spmd_engine train --report $(ARGS)
	@run=$$(ls -t runs/*/report.html 2>/dev/null | head -n 1 | cut -d/ -f2); [ -z "$$run" ] || printf '%-27s %s\n' '' '' \
	  'first, once in each shell:' '. $(BIN)/activate' \
	  'more text of this model:' "mpiexec -n $(RANKS) python -m spmd_engine generate --run $$run --prompt 'import '" \
	  'the same job, another mesh:' "$(AGAIN) --config runs/$$run/config.json --mesh model=$(RANKS) --run $$run-model" \
	  'a page that compares both:' "python -m spmd_engine report $$run $$run-model --output runs/both.html"
AGAIN = mpiexec -n $(RANKS) python -m spmd_engine train

test: $(VENV)/installed-mpich-test  ## run the tests, serial and MPI, 4 jobs at a time, or JOBS=n
	$(BIN)/python -m pytest $(HARNESS) --durations=25 $(ARGS)

test-cost: $(VENV)/installed-mpich-test  ## run the tests; write what each file costs to tests/test_cost.txt
	$(BIN)/python -m pytest $(HARNESS) --cost $(COST) $(ARGS)
	@cat $(COST)

core-alone: $(VENV)/installed-mpich-test  ## run the core's tests of one process with a copy of the package without tools
	$(BIN)/python scripts/core_alone.py -p no:hypothesispytest $(ARGS)

soak: $(VENV)/installed-mpich-test  ## run the tests that take minutes
	$(BIN)/python -m pytest $(HARNESS) -m soak --durations=25 $(ARGS)

cuda-compile: $(VENV)/installed-mpich-test-nvrtc  ## compile the CUDA kernels for three architectures, without a GPU
	$(BIN)/python -m pytest $(HARNESS) -m cuda_compile tests/arrays --durations=5 $(ARGS)

lint: $(VENV)/installed-mpich-test-lint  ## check rules and format (ruff) and types (basedpyright)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check --quiet .
	$(BIN)/basedpyright

figures: $(VENV)/installed-mpich-test  ## write the figures in docs/ that dry runs compute; ARGS=--check compares them
	SPMD_FAST=0 $(BIN)/python scripts/figures.py $(ARGS)

lines:  ## count code lines and files of each package against lines.toml
	@$(PYTHON) scripts/count_lines.py

docs: $(VENV)/installed-docs  ## build the site of the documentation in build/site; a broken link is an error
	rm -rf build/docs build/site && mkdir -p build/docs
	cp -R --parents README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs examples benchmarks/README.md build/docs
	$(BIN)/zensical build --clean --strict

bench: $(VENV)/installed-mpich-fast  ## measure speed: ARGS=train, layers or collectives
	$(BIN)/python -m spmd_engine bench $(ARGS)

clean:  ## remove what was built and cached; keep runs/ and the virtual environment
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .bench .cache
	find . -path ./$(VENV) -prune -o -path ./runs -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## remove the virtual environment as well
	rm -rf $(VENV)

# $(VENV)/installed-mpich-test: the package with its extras [mpich,test], installed again when its metadata changes.
$(VENV)/installed-%: setup.cfg pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(subst -,$(comma),$*)]'
	@touch $@
comma := ,
