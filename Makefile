# Everything works in .venv at the root. `make help` says what there is.
PYTHON ?= python3.11
JOB ?= examples/quickstart/grpo.yaml
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vLLM pins what the rest of the project has newer releases of: it lives in an environment of its own, which is what the
# image for CPUs has (its lock is complete) and what tests need besides.
VLLM_LOCK := images/functions/cpu.txt
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_TESTS := tests/generation/engines/conformance tests/generation/engines/vllm
# What builds the documentation's site is in an environment of its own too, with a complete lock.
SITE_LOCK := docs/site.txt
SITE_VENV := .venv-site
SITE_STAMP := $(SITE_VENV)/.installed
E2E ?= e2e
# A cluster for the end-to-end tests, where one comes with the machine.
CLUSTER := ../shared/cluster/cluster
# Debian ships Python without venv.
INSTALL_VENV = { [ "$$(id -u)" = 0 ] && apt-get install -qq -y python3-venv >/dev/null; } || \
	{ echo "$(PYTHON) has no venv: apt-get install python3-venv" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help run test test-all coverage test-matrix test-nightly test-vllm test-vllm-all lint types figures bench docs site images e2e lock clean

help: ## say what each target does
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "rlhfless needs Python 3.11 to 3.13: install it, or say make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(INSTALL_VENV)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

run: $(STAMP) ## set up, then train JOB (default: the quickstart, by GRPO) on this machine
	$(BIN)/rlhfless run $(JOB)

# Tests start hundreds of processes, which would each compile what they import.
unexport PYTHONDONTWRITEBYTECODE
TEST := $(BIN)/pytest --numprocesses 2 --dist worksteal

test: $(STAMP) ## set up, then run the tests but for the slow ones; ROOM=planner runs those of tests/planner alone
	$(TEST) $(addprefix tests/,$(ROOM))

test-all: $(STAMP) ## set up, then run all tests but the matrix; property tests with new examples
	HYPOTHESIS_PROFILE=ci $(TEST) -m "not matrix and not nightly"

coverage: $(STAMP) ## set up, then run the same tests and report their line coverage, in up to twice the time
	HYPOTHESIS_PROFILE=ci $(TEST) -m "not matrix and not nightly" --cov --cov-report=term:skip-covered

test-matrix: $(STAMP) ## set up, then run whole jobs with every pair of values of any two options (nightly; a quarter of an hour)
	$(TEST) -m matrix tests/matrix

test-nightly: $(STAMP) ## set up, then run what takes too long for any other run, such as jobs on a faulty store and most kills
	$(TEST) -m nightly

$(VLLM_STAMP): pyproject.toml $(VLLM_LOCK) constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "rlhfless needs Python 3.11 to 3.13: install it, or say make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(INSTALL_VENV)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --requirement $(VLLM_LOCK) --editable . || \
		{ echo "torch's CPU build is at https://download.pytorch.org/whl/cpu: name it in PIP_EXTRA_INDEX_URL" >&2; exit 1; }
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
		hypothesis 'moto[s3,server]' pytest pytest-asyncio pytest-cov pytest-timeout pytest-xdist
	@touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP) ## set up vLLM for the CPU in .venv-vllm, then run its engine's tests there
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest $(VLLM_TESTS) -k "not transformers"

test-vllm-all: $(VLLM_STAMP) ## set up vLLM in the same way, then run all of its engine's tests (nightly)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest $(VLLM_TESTS) -k "not transformers" -m "not matrix"

lint: $(STAMP) ## check style and formatting with ruff, and which way imports point with import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(STAMP) ## check the operator package with mypy --strict
	$(BIN)/mypy

figures: $(STAMP) ## print the figures of the code: rooms, imports, lines, the longest functions, docstrings
	$(BIN)/python -m tests.figures

bench: $(STAMP) ## measure a quickstart step against TRL's, on this machine
	$(BIN)/python benchmarks/peers/step_time.py

docs: $(STAMP) ## write docs/reference.md, the CRD and what the chart has of both anew
	$(BIN)/rlhfless reference > docs/reference.md
	$(BIN)/rlhfless crd > crds/rlhfjobs.rlhfless.io.yaml
	$(BIN)/python charts/tools

$(SITE_STAMP): $(SITE_LOCK)
	@command -v $(PYTHON) >/dev/null || { echo "rlhfless needs Python 3.11 to 3.13: install it, or say make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(INSTALL_VENV)
	test -x $(SITE_VENV)/bin/python || $(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip install --quiet --no-deps --requirement $(SITE_LOCK)
	@touch $(SITE_STAMP)

site: $(SITE_STAMP) ## set up, then build the documentation into site/; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/mkdocs build --strict

images: ## build the container images into dist/images, without Docker (Debian 12, as root)
	images/build

e2e: $(STAMP) ## set up, then test E2E (default: all) on KUBECONFIG's cluster, or on one that is brought up where that is at hand
	@if [ -z "$$KUBECONFIG" ] && [ -x $(CLUSTER) ]; then \
		$(CLUSTER) up && $(CLUSTER) dra up && eval "$$($(CLUSTER) env)" && export RLHFLESS_E2E_LOAD="$${RLHFLESS_E2E_LOAD:-$(CLUSTER) load}" \
			RLHFLESS_E2E_KILL_API_SERVER="$${RLHFLESS_E2E_KILL_API_SERVER:-$(CURDIR)/.ci/kill-api-server}" \
			RLHFLESS_E2E_KILL_QUEUE_PROXIES="$${RLHFLESS_E2E_KILL_QUEUE_PROXIES:-pkill -KILL -f ^/ko-app/queue}" \
			RLHFLESS_E2E_DEVICE_CLASS="$${RLHFLESS_E2E_DEVICE_CLASS:-gpu.rlhfless.test}" \
			RLHFLESS_E2E_DRA_DRIVER="$${RLHFLESS_E2E_DRA_DRIVER:-$(CURDIR)/.ci/dra-driver $(abspath $(CLUSTER))}" || exit 1; \
	fi; $(BIN)/pytest $(E2E) --verbose --timeout 3600 --durations 20

lock: ## write constraints.txt anew from what is installed in .venv, and the images' locks with uv
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt
	images/lock

clean: ## remove the environment, caches and build outputs; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) $(SITE_VENV) site .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis .coverage dist build
