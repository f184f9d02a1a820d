# make help
#
# Everything happens in .venv, which is made on first use and brought up to date when something it depends on changed.
# The package is installed there in editable form: changes in jax_dma/ count at once, changes in xla_ffi/ are compiled.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PY := $(VENV)/bin/python

GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && echo yes)
ifeq ($(GPU),yes)
  # CUDA 13 needs driver 580.
  JAX ?= jax[$(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader | awk -F. '{print $$1 >= 580 ? "cuda13" : "cuda12"; exit}')]
  WORKERS ?= 4
  export XLA_PYTHON_CLIENT_PREALLOCATE ?= false
else
  JAX ?= jax
  WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 8 ? n : 8)))
  # The suite's time on a CPU is mostly LLVM's, for programs that run once: a third less. `make fuzz` has all optimizations.
  test: export XLA_FLAGS := --xla_backend_optimization_level=0 $(XLA_FLAGS)
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NATIVE := CMakeLists.txt pyproject.toml $(shell find cmake xla_ffi -type f)
SETTINGS := $(JAX) gpu=$(GPU) cuda=$(JAX_DMA_CUDA) archs=$(JAX_DMA_CUDA_ARCHS) nvcc=$(CUDACXX)$(CUDA_HOME)

.DEFAULT_GOAL := help
.PHONY: help install test test-interop fuzz sanitize demo bench docs wheel lint clean FORCE
.DELETE_ON_ERROR:

help:
	@echo 'make demo      train a small language model with dynamic-mask and with full attention, and compare them'
	@echo 'make test      run the test suite (ARGS="-k name -x" goes to pytest, WORKERS=n sets the processes)'
	@echo 'make test-interop   install PyTorch (CPU), transformers and tokamax; compare with their Doge models, run its tests'
	@echo 'make fuzz      compare random calls with float64 (SECONDS=180, ARGS="--seed n --implementation name")'
	@echo 'make sanitize  run the tests of the host kernels with AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make bench     measure forward and backward against the other attention implementations installed'
	@echo 'make wheel     build wheels into dist/, for CPUs and where there is an nvcc for GPUs (ARCHS="80;90a"), and test them'
	@echo 'make docs      build the documentation in build/site, and redraw its pictures'
	@echo 'make install   only make $(VENV) and build the package in it; then $(VENV)/bin/python -m jax_dma tells what works'
	@echo 'make lint      run ruff'
	@echo 'make clean     remove $(VENV) and build/'
	@echo
	@echo 'PYTHON=...     the Python (3.11 or newer) that $(VENV) is made from, now $(PYTHON)'
	@echo 'JAX_DMA_CUDA_ARCHS=80,90a   build the CUDA kernels for these GPUs even where none is visible; JAX_DMA_CUDA=OFF: never'

test: install
	$(VENV)/bin/pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-interop: install $(VENV)/interop
	$(VENV)/bin/pytest -n $(WORKERS) tests/interop $(ARGS)

SECONDS ?= 180
fuzz: install
	$(PY) -u tests/fuzz.py --seconds $(SECONDS) $(ARGS)

# The sanitizers' libraries, and the C++ library whose functions they replace, have to be in the process before Python's
# own. Python and XLA free little at exit, so leaks are not reported.
SANITIZED ?= tests/test_attention.py tests/test_ffi.py tests/test_threads.py tests/test_fuzz.py
CXX_LIBRARY = $(shell $(CXX) -print-file-name=lib$(1).so)
sanitize: install
	@mkdir -p build
	$(VENV)/bin/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja) -DCMAKE_CXX_COMPILER=$(CXX) -DPython_EXECUTABLE=$(abspath $(PY)) -DJAX_DMA_SANITIZE=ON -DJAX_DMA_CUDA=OFF > build/sanitize.log
	$(VENV)/bin/cmake --build build/sanitize >> build/sanitize.log || { tail -n 60 build/sanitize.log; exit 1; }
	LD_PRELOAD="$(call CXX_LIBRARY,asan) $(call CXX_LIBRARY,ubsan) $(call CXX_LIBRARY,stdc++)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 JAX_PLATFORMS=cpu \
	  $(PY) tests/sanitized.py build/sanitize $(SANITIZED) --implementation cpu $(ARGS)

demo: install
	$(PY) examples/demo.py $(ARGS)

bench: install
	$(PY) benchmarks/forward_performance.py $(ARGS)
	$(PY) benchmarks/backward_performance.py $(ARGS)

# ARCHS= leaves the wheel with CUDA kernels out.
NVCC = $(or $(CUDACXX),$(CUDA_HOME:%=%/bin/nvcc),nvcc)
ARCHS ?= $(if $(shell command -v $(NVCC))$(wildcard /usr/local/cuda/bin/nvcc),80;90a;100;120)
wheel:
	@$(PYTHON) -c "$$CHECK_PYTHON"
	cmake/wheel.sh $(PYTHON)
	$(if $(ARCHS),cmake/wheel.sh $(PYTHON) "$(ARCHS)",@echo '==> no nvcc, or no ARCHS: no wheel with CUDA kernels')

# A warning is an error: a link that leads nowhere, a name that docstrings refer to and that does not exist.
docs: install $(VENV)/docs
	JAX_PLATFORMS=cpu $(PY) docs/pictures.py
	JAX_PLATFORMS=cpu $(PY) -m sphinx -b html -q -E -W --keep-going -d build/doctrees docs build/site $(ARGS)
	@echo 'the site is in build/site/index.html'

lint: install
	@$(VENV)/bin/ruff --version >/dev/null 2>&1 || $(PY) -m pip install -qq ruff
	$(VENV)/bin/ruff check . $(ARGS)

install: $(VENV)/installed

clean:
	rm -rf $(VENV) build

# The rest makes .venv: Python, then packages, then this package.

define CHECK_PYTHON
import os, shutil, sys, sysconfig
def need(what, how):
    sys.exit("jax_dma needs %s; %s" % (what, how))
if sys.version_info < (3, 11):
    need("Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0], "name another one: make PYTHON=python3.12 ...")
try:
    import ensurepip, venv
except ImportError:
    need("Python's venv with ensurepip", "install it (Debian and Ubuntu: apt install python3-venv)")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    need("Python's headers", "install them (Debian and Ubuntu: apt install python3-dev)")
if not any(map(shutil.which, filter(None, [os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"]))):
    need("a C++17 compiler", "install one (Debian and Ubuntu: apt install g++), or set CXX")
endef
export CHECK_PYTHON

define REQUIREMENTS
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    settings = tomllib.load(file)
extras = settings["project"]["optional-dependencies"]
build = [r for r in settings["build-system"]["requires"] if not r.startswith("jaxlib")] + ["cmake", "ninja"]
run = settings["project"]["dependencies"] + extras["test"] + extras["demo"] + extras["bench"]
print(*dict.fromkeys(build if sys.argv[1] == "build" else run), sep="\n")
endef
export REQUIREMENTS

$(PY):
	@command -v $(PYTHON) >/dev/null || { echo 'jax_dma needs Python 3.11 or newer, and there is no $(PYTHON); name another one: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@echo '==> making $(VENV) with '"$$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)

# Rewritten only when it changes, so that what depends on it is.
$(VENV)/settings: FORCE | $(PY)
	@echo '$(SETTINGS)' | cmp -s - $@ || echo '$(SETTINGS)' > $@

$(VENV)/packages: pyproject.toml $(VENV)/settings | $(PY)
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'jax_dma needs Python 3.11 or newer, and $(VENV) has '"$$($(PY) --version)"'; run make clean' >&2; exit 1; }
	@$(PY) -c "$$REQUIREMENTS" build > $(VENV)/requirements-build.txt
	@$(PY) -c "$$REQUIREMENTS" run > $(VENV)/requirements-run.txt
	@echo '==> [1/4] build tools'
	@$(PY) -m pip install -qq -r $(VENV)/requirements-build.txt
	@echo '==> [2/4] $(JAX)'
	@$(PY) -m pip install -qq '$(JAX)>=0.10'
	@echo '==> [3/4] flax, pytest and what else tests, demo and benchmarks use'
	@$(PY) -m pip install -qq -r $(VENV)/requirements-run.txt
	@touch $@

# Against the jaxlib that is there: pip's isolated environment would download a second one for each build.
$(VENV)/installed: $(NATIVE) $(VENV)/packages
	@echo '==> [4/4] jax_dma (compiling; the log is $(VENV)/install.log)'
	@$(PY) -m pip install -v --no-build-isolation --no-deps -e . > $(VENV)/install.log 2>&1 || { tail -n 60 $(VENV)/install.log; exit 1; }
	@sed -n 's/^ *-- jax_dma: /    /p' $(VENV)/install.log
	@touch $@

# PyTorch for CPUs: the wheel, if pip was told of a folder with one, or from where PyTorch publishes it. The one on PyPI
# brings CUDA along.
$(VENV)/interop: $(VENV)/packages
	@echo '==> PyTorch (CPU), transformers, safetensors, tokamax'
	@$(PY) -m pip install -qq --no-index --no-deps torch 2>/dev/null || $(PY) -m pip install -qq --index-url https://download.pytorch.org/whl/cpu torch
	@$(PY) -m pip install -qq torch transformers safetensors tokamax chex
	@touch $@

$(VENV)/docs: $(VENV)/packages
	@echo '==> Sphinx'
	@$(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(VENV)/requirements-docs.txt
	@$(PY) -m pip install -qq -r $(VENV)/requirements-docs.txt
	@touch $@

FORCE:
