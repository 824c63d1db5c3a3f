# Two commands for newcomers: `make test` and `make train`. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test train check fmt clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

test: .venv/installed
	$(BIN)/pytest -n auto

train: .venv/installed
	$(BIN)/python examples/00_select_and_diagnose.py

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest -q tests/test_layers.py tests/test_slim_install.py
	rm -rf .venv-slim && $(PYTHON) -m venv .venv-slim
	.venv-slim/bin/pip install --quiet --constraint constraints.txt .
	cd / && "$(CURDIR)/.venv-slim/bin/moored" check-env bandit
	rm -rf .venv-slim

fmt: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-slim .pytest_cache .ruff_cache .hypothesis
