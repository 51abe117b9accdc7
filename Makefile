# Each target sets up .venv with what it needs; required are only Python, make and a C++ compiler. The first run
# downloads PyTorch.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo generate test bench build docs gpu-library gpu-check compile-all lint format clean

PYTHON ?= python3
VENV ?= .venv
PROCS ?= 2
ARGS ?=
ARCH ?= 9.0a

CORES := $(shell nproc)
THREADS := $(shell echo $$(( $(CORES) > $(PROCS) ? $(CORES) / $(PROCS) : 1 )))
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
HAS_GPU := $(wildcard /dev/nvidia0)
# More processes than cores, because some tests wait: for other processes, or for a compiler. Coverage means something
# only when all tests run.
WHOLE_RUN := --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 20 $(if $(filter --full,$(ARGS)),--cov)
# The tests look at the machine code of one architecture for each kind of kernel; the other three of the default would
# double the time of the build.
TEST_ARCHS := $(if $(HAS_GPU),,8.0;9.0a)
# Without a GPU the demo does not build the CUDA kernels, so that it starts quickly.
DEMO_CUDA := $(if $(HAS_GPU),auto,0)

help: ## print this list
	@echo "make TARGET [ARGS='more arguments'] [PYTHON=python3.12]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 14

demo: $(VENV)/.torch $(if $(HAS_GPU),$(VENV)/.toolkit) ## train a small GPT (ARGS for examples/train_gpt.py)
	@$(call compile,$(DEMO_CUDA))
	@CUDA_EXT_CUDA=$(DEMO_CUDA) $(MAKE) --silent --no-print-directory $(VENV)/.demo
	OMP_NUM_THREADS=$(THREADS) $(BIN)/torchrun --standalone --nproc-per-node $(PROCS) examples/train_gpt.py $(ARGS)

generate: $(VENV)/.torch $(if $(HAS_GPU),$(VENV)/.toolkit) ## let the demo's GPT write text (ARGS for examples/write_gpt.py)
	@$(call compile,$(DEMO_CUDA))
	@CUDA_EXT_CUDA=$(DEMO_CUDA) $(MAKE) --silent --no-print-directory $(VENV)/.demo
	$(BIN)/python examples/write_gpt.py $(ARGS)

test compile-all: export TORCH_CUDA_ARCH_LIST ?= $(TEST_ARCHS)
test: $(VENV)/.toolkit ## compile every kernel, lint, run the tests (ARGS=--full: all of them; other ARGS for pytest)
	@$(MAKE) --silent --no-print-directory --jobs 2 compile-all lint
	@CUDA_EXT_CUDA=1 $(MAKE) --silent --no-print-directory $(VENV)/.test
	$(BIN)/python -m pytest $(ARGS) $(if $(filter-out --full,$(ARGS)),,$(WHOLE_RUN))

bench: $(VENV)/.torch $(if $(HAS_GPU),$(VENV)/.toolkit) ## compare with every installed baseline (ARGS for python -m benchmarks)
	@$(call compile,$(DEMO_CUDA))
	@CUDA_EXT_CUDA=$(DEMO_CUDA) $(MAKE) --silent --no-print-directory $(VENV)/.demo
	$(BIN)/python -m benchmarks $(ARGS)

build: $(VENV)/.torch ## compile the library into cuda_ext/ (CUDA_EXT_CUDA=auto|0|1)
	@$(call compile,$${CUDA_EXT_CUDA:-auto})

docs: $(VENV)/.torch ## build the documentation site, build/site/index.html
	@$(call compile,$${CUDA_EXT_CUDA:-auto})
	@$(MAKE) --silent --no-print-directory $(VENV)/.docs
	$(BIN)/python tools/build_docs.py $(ARGS)

gpu-library: $(VENV)/.toolkit ## compile for a GPU elsewhere into gpu-library.tar.gz, which gpu-check uses there (ARCH=9.0a; ARGS=name: a variant)
	@TORCH_CUDA_ARCH_LIST=$(ARCH) $(call compile,1)
	$(BIN)/python -m benchmarks.gpu_check.carried pack $(ARGS)

# Does not use .venv: a machine with a GPU has its own PyTorch, and perhaps no network.
gpu-check: ## check and measure everything on a CUDA GPU, in 9 minutes; call it again to continue (ARGS=--help)
	$(PYTHON) -m benchmarks.gpu_check $(ARGS)

# Installing and linting use one core, so `make test` compiles at the same time.
compile-all: $(VENV)/.toolkit
	@$(call compile,1)

lint: $(VENV)/.packages ## ruff, clang-format and mypy
	@$(check)

format: $(VENV)/.packages ## rewrite Python and C++ as the linters want them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	find csrc tests $(CXX_FILES) | xargs $(BIN)/clang-format -i

clean: ## remove what was built, but keep .venv
	rm -rf build gpu-library*.tar.gz cuda_ext.egg-info cuda_ext/_C.so cuda_ext/_build_info.py
	rm -rf .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find cuda_ext tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

CXX_FILES := -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp' -o -name '*.inc'
define check
set -x; $(BIN)/ruff check; $(BIN)/ruff format --check --quiet
find csrc tests $(CXX_FILES) | xargs $(BIN)/clang-format --dry-run --Werror
$(BIN)/mypy
endef

# ninja prints whole compiler commands; sed reduces them to the file.
compile = CUDA_EXT_CUDA=$(1) $(BIN)/python setup.py --quiet build_ext --inplace \
	| sed -uE 's|^(\[[0-9]+/[0-9]+\]) .* -c $(CURDIR)/([^ ]+) -o .*|\1 \2|'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	  "cuda_ext needs Python 3.10 or newer, and $(PYTHON) is older; choose another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "installing PyTorch into $(VENV), which takes a minute or two"
	$(INSTALL) torch numpy setuptools ninja
	@touch $@

$(VENV)/.toolkit: $(VENV)/.torch
	$(INSTALL) "$$($(BIN)/python -m cuda_ext._toolchain)"
	@touch $@

# What the tests import and the linters, without cuda_ext itself.
$(VENV)/.packages: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "installing the packages that the tests use into $(VENV)"
	$(INSTALL) $$($(BIN)/python tools/required_by_tests.py)
	@touch $@

$(VENV)/.test: $(VENV)/.packages
	$(INSTALL) --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.demo $(VENV)/.docs: $(VENV)/.%: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "installing cuda_ext[$*] into $(VENV)"
	$(INSTALL) --no-build-isolation --editable ".[$*]"
	@touch $@
