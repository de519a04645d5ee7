# make demo and make test set up .venv first, as far as that is not done yet.
#
# Each step leaves a stamp in .venv when it has succeeded, so a run that was cut
# off goes on where it was. The first step always starts from an empty .venv:
# half-installed packages can look complete to pip. As that removes the other
# stamps too, Horovod gets built again whenever TensorFlow may have changed.

# The first that runs (being on PATH is not enough: it may be a version
# manager's stand-in for a Python that is not there).
PYTHON ?= $(or $(firstword $(foreach p,python3.11 python3,$(shell $(p) -c '' 2>/dev/null && echo $(p)))),python3.11)
JOBS ?= $(shell nproc)
DATA_DIR ?= $(HVD_FEC_DATA_DIR)
PYTEST_ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Where the pinned cmake is.
VENV_FIRST := PATH="$(CURDIR)/$(BIN):$$PATH"

BASE := .venv/.base
HOROVOD := .venv/.horovod
EXTENSION := .venv/.extension
TOOLS := .venv/.tools
FUZZER := .venv/.fuzzer

HOROVOD_LOG := .venv/horovod-build.log
EXTENSION_LOG := .venv/extension-build.log
EXTENSION_SOURCES := setup.py pyproject.toml hvd_fec/_version.py \
	$(foreach e,pyx pxd c h,$(wildcard hvd_fec/_ext/*.$(e)))

HOROVOD_OPTIONS := HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 \
	HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
	HOROVOD_CPU_OPERATIONS=GLOO

.DELETE_ON_ERROR:
.NOTPARALLEL: # two pips must not work on one .venv
.PHONY: help demo test soak lint clean distclean FORCE

help: ## Show this
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(HOROVOD) $(EXTENSION) ## Train on two processes; DATA_DIR=folder to use MNIST files
	TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/horovodrun -np 2 $(BIN)/python recipes/mnist.py --compression fec --threshold -6 --epochs 2$(if $(DATA_DIR), --data-dir '$(DATA_DIR)')

test: $(HOROVOD) $(EXTENSION) $(TOOLS) ## Run the tests; PYTEST_ARGS=... goes to pytest
	$(strip $(BIN)/python -m pytest $(PYTEST_ARGS))

soak: $(HOROVOD) $(EXTENSION) $(TOOLS) $(FUZZER) ## Run the tests that take hours; PYTEST_ARGS=... goes to pytest
	$(strip $(BIN)/python -m pytest -v -s tests/soak $(PYTEST_ARGS))

lint: $(TOOLS) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## Remove what was built from this tree, but keep .venv
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis $(EXTENSION)
	rm -f hvd_fec/_ext/*.so
	find hvd_fec tests recipes tools -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## Remove .venv as well
	rm -rf .venv

# A .venv holds absolute paths, so one that was moved or copied with its tree
# has to be made again: the stamp says where it was made.
$(BASE): requirements/build.txt requirements/run.txt requirements/horovod.txt \
		$(if $(filter-out $(CURDIR),$(file <$(BASE))),FORCE)
	@command -v '$(PYTHON)' >/dev/null || { echo 'hvd_fec: missing Python 3.11: $(PYTHON) not found; on Debian: apt-get install python3 python3-venv python3-dev' >&2; exit 1; }
	@'$(PYTHON)' tools/preflight.py venv
	@echo 'hvd_fec: making .venv with TensorFlow in it; this takes about a minute and downloads about 350 MB'
	@'$(PYTHON)' -m venv --clear .venv
	@$(PIP) install -q -r requirements/build.txt -r requirements/run.txt
	@echo '$(CURDIR)' >$@

# --no-cache-dir, as a wheel in pip's cache may have been built for another
# TensorFlow; --ignore-installed, as an earlier try may have left half of it;
# --no-deps, as Horovod's needs are pinned in requirements/. MAKEFLAGS is set
# for Horovod's make, which must not inherit the options given to this one.
$(HOROVOD): $(BASE)
	@$(VENV_FIRST) $(BIN)/python tools/preflight.py horovod
	@echo 'hvd_fec: building Horovod, once; this takes about 4 minutes (log: $(HOROVOD_LOG))'
	@$(VENV_FIRST) MAKELEVEL= MAKEFLAGS=-j$(JOBS) $(HOROVOD_OPTIONS) \
		$(PIP) install -v --no-build-isolation --no-cache-dir --ignore-installed --no-deps \
		-r requirements/horovod.txt >$(HOROVOD_LOG) 2>&1 \
		|| { echo 'hvd_fec: building Horovod failed; see $(HOROVOD_LOG)' >&2; exit 1; }
	@touch $@

$(EXTENSION): $(BASE) $(EXTENSION_SOURCES) $(if $(wildcard hvd_fec/_ext/_kernels.*.so),,FORCE)
	@$(BIN)/python tools/preflight.py extension
	@echo 'hvd_fec: building the extension'
	@$(PIP) install -v --no-build-isolation --no-deps -e . >$(EXTENSION_LOG) 2>&1 \
		|| { echo 'hvd_fec: building the extension failed; see $(EXTENSION_LOG)' >&2; exit 1; }
	@touch $@

$(FUZZER): $(BASE) requirements/soak.txt
	@echo 'hvd_fec: installing the fuzzer'
	@$(PIP) install -q -r requirements/soak.txt
	@touch $@

$(TOOLS): $(BASE) requirements/test.txt
	@echo 'hvd_fec: installing the test tools'
	@$(PIP) install -q -r requirements/test.txt
	@touch $@
