# Two commands are all the set-up: `make run` and `make test`.
PYTHON ?= python3
PY := .venv/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test test-fast test-lowest check bench ci-deps clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/ready

run: .venv/ready ## environment, model, the default experiment, frontier and dashboard (ARGS="compress=int8 task=needle" to change it)
	$(PY) -m harness $(ARGS)

test: .venv/ready ## every test, the slow ones too
	HF_HUB_OFFLINE=1 TQDM_DISABLE=1 $(PY) -m pytest $(ARGS)

test-fast: .venv/ready ## the tests that need no real model
	HF_HUB_OFFLINE=1 TQDM_DISABLE=1 $(PY) -m pytest -m "not slow" $(ARGS)

LOWEST := tests/integration/test_keep_all.py tests/integration/test_fused.py tests/integration/test_statistics_exact.py

.venv-lowest/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-lowest
	grep -vE '^(transformers|huggingface_hub|tokenizers|datasets|lm.eval|evaluate)==' constraints.txt > .venv-lowest/constraints.txt
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check -c .venv-lowest/constraints.txt -e '.[dev]' 'transformers==5.2.0'
	touch .venv-lowest/ready

test-lowest: .venv-lowest/ready ## the equality tests on the oldest supported transformers
	HF_HUB_OFFLINE=1 TQDM_DISABLE=1 .venv-lowest/bin/python -m pytest -m "not slow" $(LOWEST)

check: .venv/ready ## formatting, lint and types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: .venv/ready ## ratios on this machine: fused sweep, statistics, keep-all overhead, codecs
	for script in tests/bench/fused_sweep.py tests/bench/fused_stream.py tests/bench/overhead.py tests/bench/codecs.py; do $(PY) $$script || exit 1; done

ci-deps: ## system packages that some tests need (Debian: chromium)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null

clean: ## remove the environment and caches of tools, never results
	rm -rf .venv .venv-lowest .pytest_cache .mypy_cache .ruff_cache
