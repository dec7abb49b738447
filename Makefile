# Two commands are all the set-up: `make run` and `make test`.
PYTHON ?= python3
PY := .venv/bin/python
ARGS ?=
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help run test test-fast test-lowest test-ray check bench references trained study ci-deps clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/ready

FIRST := results/first-look
run: .venv/ready ## environment, model, needles in both modes and a stream on one page, in minutes (ARGS="compress=int8" runs that instead)
ifeq ($(strip $(ARGS)),)
	$(PY) -m harness -m experiment=first_look results_dir=$(FIRST) task=needle 'task.lengths=[768]' task.query_aware=false,true
	$(PY) -m harness experiment=first_look results_dir=$(FIRST) task=stream task.tokens=512 task.context=256
	$(PY) -m harness.report $(FIRST) --out $(FIRST)/dashboard.html
else
	$(PY) -m harness $(ARGS)
endif

# Many processes are started: what one of them has compiled, the next need not.
test: .venv/ready ## every test, the slow ones too
	HF_HUB_OFFLINE=1 TQDM_DISABLE=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: .venv/ready ## the tests that need no real model
	HF_HUB_OFFLINE=1 TQDM_DISABLE=1 $(PY) -m pytest -m "not slow" $(ARGS)

LOWEST := tests/integration/kv/test_keep_all.py tests/integration/engine/test_fused.py tests/integration/kv/test_statistics_exact.py \
	tests/integration/kv/test_latents.py tests/integration/kv/test_latent_stores.py tests/integration/kv/test_softmax_families.py \
	tests/integration/kv/test_batch_views.py

.venv-lowest/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-lowest
	grep -vE '^(transformers|huggingface_hub|tokenizers|datasets|lm.eval|evaluate)==' constraints.txt > .venv-lowest/constraints.txt
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check -c .venv-lowest/constraints.txt -e '.[dev]' 'transformers==5.2.0'
	touch .venv-lowest/ready

# With as many threads as there are cores, while `make test` gives each of its processes one.
test-lowest: .venv-lowest/ready ## the equality tests on the oldest supported transformers, in several threads
	HF_HUB_OFFLINE=1 TQDM_DISABLE=1 .venv-lowest/bin/python -m pytest -m "not slow" $(LOWEST)

# Ray is large and unlike the rest not needed by `make test`: an environment of its own that sees the packages of .venv.
.venv-ray/ready: .venv/ready
	$(PY) -m venv .venv-ray
	$(PY) -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" > layer.pth
	mv layer.pth $$(.venv-ray/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/layer.pth
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ray
	touch .venv-ray/ready

test-ray: .venv-ray/ready ## the sweep on a real Ray, in an environment of its own
	HF_HUB_OFFLINE=1 TQDM_DISABLE=1 timeout -s KILL 900 .venv-ray/bin/python -m pytest tests/cluster/test_ray.py

check: .venv/ready ## formatting, lint and types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: .venv/ready ## ratios on this machine: fused sweep and streams, multirun, decode step, keep-all overhead, codecs, shares, report; what a step asks of a device
	for script in fused_sweep fused_stream decode_step multirun overhead codecs shares report device_costs; do $(PY) tests/bench/$$script.py || exit 1; done

references: .venv/ready ## the committed curves again, many hours; goes on where it was (one of them: make reference-needle-smollm2)
	$(PY) results/reference/rebuild.py

trained: .venv/ready ## tiny models of seven designs trained and measured: recall against KV bytes; goes on where it was
	$(PY) results/reference/rebuild.py trained-in

study: .venv/ready ## the reference study, four tasks, 80 stacks, two families: an hour and a half on one core; goes on where it was
	$(PY) results/reference/rebuild.py study

reference-%: .venv/ready
	$(PY) results/reference/rebuild.py $*

ci-deps: ## system packages that some tests need (Debian: chromium, slurm)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core \
		slurmctld slurmd slurm-client iproute2 >/dev/null

clean: ## remove the environment and caches of tools, never results
	rm -rf .venv .venv-lowest .venv-ray .pytest_cache .mypy_cache .ruff_cache
