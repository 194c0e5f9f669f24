# Everything a developer types. The virtual environment is made on first use and again when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Where this is set (images of containers like to), each of the suite's hundreds of Pythons compiles torch's sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check lint kernels clean

demo: $(VENV)/.installed
	$(BIN)/nanovllm run tiny "Once upon a time"

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

check: lint test kernels

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy

# All GPU kernels for all architectures; those whose sources and compiler are the ones of the table are not compiled again.
kernels: $(VENV)/.installed-test
	$(BIN)/python scripts/kernel_resources.py

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Without compiling thousands of modules that nobody imports: Python does so with the others, and keeps the result.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --no-compile --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --no-compile --editable '.[test,check,kernels-test,clients]'
	touch $@ $(VENV)/.installed
