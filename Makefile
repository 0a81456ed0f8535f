# Every command of the project, once. Needs python3, g++ and make; the rest
# goes into $(VENV). Versions stand in pyproject.toml alone.

PYTHON ?= python3
VENV ?= .venv
export MAX_JOBS ?= $(shell nproc 2>/dev/null || echo 2)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A checkout has the kernels of its own processor; `make POPSIM_TARGETS=all build` builds all.
export POPSIM_TARGETS ?= own

PY := $(VENV)/bin/python
STAMPS := $(VENV)/.popsim_torch
# Python compiles a module when it is first imported: most of those of PyTorch never are.
PIP_INSTALL := $(PY) -m pip install --quiet --quiet --no-compile
KEEP_BYTECODE := env -u PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
.PHONY: build demo tutorials notebooks bench bench-quick models docs wheel clean help lint format types
.PHONY: coverage-ops validate test test-targets test-without-onednn test-portable test-avx2 test-asan golden slow

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- Environment -------------------------------------------------------------
# One stamp per set of packages. An environment that is already there is used
# as it is: pip has nothing to do for a requirement that is met.

# Prints one list of requirements of pyproject.toml: `build`, or the name of an
# extra or a group.
define READ_REQUIREMENTS
import sys
try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    data = tomllib.load(file)
lists = data["project"]["optional-dependencies"] | data["dependency-groups"]
lists["build"] = data["build-system"]["requires"]
print("\n".join(lists[sys.argv[1]]))
endef
export READ_REQUIREMENTS

$(STAMPS)/venv:
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

# Written anew with pyproject.toml, newer only when the list itself changed.
.PRECIOUS: $(STAMPS)/%.txt
$(STAMPS)/%.txt: pyproject.toml Makefile | $(STAMPS)/venv
	@$(PY) -c "$$READ_REQUIREMENTS" $* > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

.PRECIOUS: $(STAMPS)/%.installed
$(STAMPS)/%.installed: $(STAMPS)/%.txt $(STAMPS)/pinned.txt
	@echo "Installing the $* requirements into $(VENV)"
	@$(PIP_INSTALL) -r $< -c $(STAMPS)/pinned.txt
	@touch $@

# --- The extension -----------------------------------------------------------
# Built in place, so that ninja compiles only what changed. Folders are prerequisites too: their
# time changes when a file is removed.

SOURCES := $(shell find csrc 2>/dev/null) setup.py pyproject.toml
EXTENSION := $(STAMPS)/extension-$(POPSIM_TARGETS)
ifeq ($(wildcard popsim_torch/_C*.so),)
.PHONY: $(EXTENSION)
endif

# The checkout becomes importable, and gets its command.
define INSTALL_CHECKOUT
import os, sys, sysconfig
with open(os.path.join(sysconfig.get_path("purelib"), "popsim_torch.pth"), "w") as file:
    file.write(os.getcwd() + "\n")
command = os.path.join(sysconfig.get_path("scripts"), "popsim")
with open(command, "w") as file:
    file.write(f"#!{sys.executable}\nimport sys\nfrom popsim_torch.__main__ import main\nsys.exit(main())\n")
os.chmod(command, 0o755)
endef
export INSTALL_CHECKOUT

$(EXTENSION): $(SOURCES) | $(STAMPS)/build.installed $(STAMPS)/run.installed
	@$(PY) setup.py --quiet build_ext --inplace egg_info
	@$(PY) -c "$$INSTALL_CHECKOUT"
	@$(KEEP_BYTECODE) $(PY) -c "import popsim_torch"
	@touch $@

build: $(EXTENSION) ## compile the extension and make the package importable

# --- Use it ------------------------------------------------------------------

demo: build $(STAMPS)/tutorials.installed ## run the gradient-histogram tutorial
	@$(KEEP_BYTECODE) $(PY) tutorials/observing_tensors/gradient_histogram.py

tutorials: build $(STAMPS)/dev.installed $(STAMPS)/tutorials.installed ## run every tutorial as a test
	$(PY) -m pytest -m tutorial

# `make models` runs benchmarks/models.py, which takes longer than all others.
BENCHMARKS := $(filter-out models,$(sort $(basename $(notdir $(wildcard benchmarks/*.py)))))
BENCH_OPTIONS ?=

bench: build ## run every benchmark
	@for name in $(BENCHMARKS); do \
	  printf '\n## %s\n\n' "$$name"; \
	  $(PY) -m benchmarks.$$name $(BENCH_OPTIONS) || exit 1; \
	done

models: build $(STAMPS)/tutorials.installed $(STAMPS)/models.installed ## train whole models beside eager PyTorch, write docs/models.md
	$(PY) -m benchmarks.models --page docs/models.md

bench-quick: ## run every benchmark with one round each
	@$(MAKE) --no-print-directory bench BENCH_OPTIONS="--rounds 1"

# --- Check it ----------------------------------------------------------------

CXX_FILES = $(shell find csrc popsim_torch tests tutorials -name '*.h' -o -name '*.cpp')

# A file of tests runs in one process. Where there are as many processes as cores, threads that wait
# must not spin; all processes must list the tests in one order. Compiled modules are kept: hundreds of
# processes import the same ones, and pytest rewrites each test for its own. Files go in the order of
# their names: those with the fewest tests are among the longest, and none of them should come last.
PARALLEL = $(KEEP_BYTECODE) PYTHONHASHSEED=0 OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 $(PY) -m pytest -n $(MAX_JOBS) --dist loadfile --no-loadscope-reorder
test: build $(STAMPS)/dev.installed $(STAMPS)/tutorials.installed ## run the tests, without the slow ones
	$(PARALLEL) -m "not slow"

# Under each target that this processor has, the libraries beside the kernels held to it as well.
test-targets: $(STAMPS)/dev.installed $(STAMPS)/tutorials.installed ## run the tests for each kind of processor
	@$(MAKE) --no-print-directory POPSIM_TARGETS=all build
	for target in $$($(PY) -c 'from popsim_torch import build_info; print(*build_info().usable_targets)'); do \
	  echo "POPSIM_CPU=$$target"; POPSIM_CPU=$$target $(PY) -m pytest -m "not slow" || exit 1; \
	done
	@$(MAKE) --no-print-directory test-without-onednn test-portable

# Another build lies beside the package's files in build/<name>; processes that tests start find it,
# too.
define TEST_BUILD
$(2) $(PY) setup.py --quiet build --build-temp build/$(1)/temp --build-lib build/$(1)/lib
$(2) PYTHONPATH=$(abspath build/$(1)/lib) $(PY) -m pytest -m "not slow" -p no:cacheprovider -o "pythonpath=build/$(1)/lib . tutorials"
endef

test-without-onednn: build $(STAMPS)/dev.installed $(STAMPS)/tutorials.installed ## run the tests with ATen's kernels for dense math
	$(call TEST_BUILD,without_onednn,POPSIM_WITHOUT_ONEDNN=1)

FALLBACKS := POPSIM_TARGETS=baseline POPSIM_WITHOUT_ONEDNN=1 POPSIM_WITHOUT_OPENMP=1
test-portable: build $(STAMPS)/dev.installed $(STAMPS)/tutorials.installed ## run the tests with what other machines fall back to
	$(call TEST_BUILD,portable,$(FALLBACKS))

# What depends most on the kernels, as processors with AVX2 alone run it; `make test-targets` runs all.
AVX2_TESTS ?= tests/ops tests/golden tests/parity/observing/test_observing_bits.py tests/unit/lowering \
  tests/unit/test_processor.py $(patsubst %,tests/parity/test_%.py,attention complex ctc_loss half_partials image_layouts \
  inference known_values losses precision random_graphs recurrent serialized_matmul small_gradients training)
test-avx2: $(STAMPS)/dev.installed
	@$(MAKE) --no-print-directory POPSIM_TARGETS=all build
	POPSIM_CPU=avx2 $(PARALLEL) -q -m "not slow" $(AVX2_TESTS)

golden: build $(STAMPS)/dev.installed ## write the golden programs anew; read the difference
	POPSIM_ACCEPT_GOLDEN=1 $(PY) -m pytest -q tests/golden

# The extension with AddressSanitizer lies beside the package's files in build/asan. The C++ library
# is loaded together with the sanitizer, which looks for it at once; pytest catches what processes
# print, so reports are files.
ASAN := build/asan
ASAN_TESTS := tests/mutants tests/unit/memory tests/parity/test_stage_buffers.py tests/parity/control \
  tests/parity/observing tests/parity/watch $(patsubst %,tests/parity/test_%.py,replica_groups replica_queues) \
  $(patsubst %,tests/error/test_%.py,feeds_faults feeds_users training_faults) \
  $(patsubst %,tests/ops/test_%.py,anchor aten ctc_beam_search ctc_loss channel_statistics custom embedding fps grouped_updates join nearest nll_loss pooling recurrent statistics)
test-asan: build $(STAMPS)/dev.installed ## run spoilt and good programs where misused memory stops them (a slow build)
	POPSIM_SANITIZE=address $(PY) setup.py --quiet build --build-temp $(ASAN)/temp --build-lib $(ASAN)/lib
	@rm -f $(ASAN)/report.*
	library() { $${CXX:-g++} -print-file-name=$$1; }; \
	  LD_PRELOAD="$$(library libasan.so) $$(library libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:log_path=$(ASAN)/report \
	  $(PY) -m pytest -o "pythonpath=$(ASAN)/lib . tutorials" -p no:cacheprovider $(ASAN_TESTS) \
	  || { cat $(ASAN)/report.*; exit 1; }

slow: build $(STAMPS)/dev.installed $(STAMPS)/tutorials.installed $(STAMPS)/models.installed $(STAMPS)/docs.installed ## run the slow tests (an hour)
	$(PARALLEL) -m slow

COVERAGE_OPTIONS ?= --most 8
coverage-ops: build $(STAMPS)/dev.installed ## compare PyTorch's operators with eager PyTorch; writes docs/ops.md (hours)
	$(KEEP_BYTECODE) $(PY) -m tests.coverage --processes $(MAX_JOBS) --page docs/ops.md $(COVERAGE_OPTIONS)

validate: build ## compare the machine model with published figures
	$(PY) -m popsim_torch.validation

lint: $(STAMPS)/dev.installed ## check style and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: $(STAMPS)/dev.installed ## rewrite every file in the project's format
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

# mypy reads torch's and numpy's annotations from the environment.
types: $(STAMPS)/run.installed $(STAMPS)/dev.installed ## check the annotations
	$(PY) -m mypy

# --- Pages -------------------------------------------------------------------

docs: build $(STAMPS)/docs.installed ## build the pages in build/docs
	$(PY) -m sphinx -q -W --keep-going -b html docs build/docs

notebooks: build $(STAMPS)/dev.installed ## write a notebook for each tutorial from its README
	$(PY) docs/notebooks.py

# --- Packages ----------------------------------------------------------------
# The wheel is built from the source package, and leaves to others what they bring: torch its
# libraries and OpenMP, onednn-cpu-gomp oneDNN. auditwheel says on which systems it runs.

PACKAGES := build/packages
wheel: $(STAMPS)/build.installed $(STAMPS)/run.installed $(STAMPS)/package.installed ## write packages to dist and try them in an environment of their own
	rm -rf $(PACKAGES) dist
	POPSIM_TARGETS=all $(PY) -m build --no-isolation --outdir $(PACKAGES) .
	mkdir dist && cp $(PACKAGES)/*.tar.gz dist
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m auditwheel repair --wheel-dir dist \
	  --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libdnnl*' --exclude 'libgomp*' \
	  $(PACKAGES)/*.whl || cp $(PACKAGES)/*.whl dist
	$(PY) -m venv --clear $(PACKAGES)/venv
	$(PACKAGES)/venv/bin/python -m pip install --quiet dist/*.whl
	$(PACKAGES)/venv/bin/python -I tests/unit/trains_like_eager.py

clean: ## remove build products; the environment stays
	rm -rf build dist *.egg-info popsim_torch/_C*.so popsim_torch/built_for.txt
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f $(STAMPS)/extension-*
