# Two commands to begin with:
#   make demo         trains digits on this machine, kills a node in the middle and shows the recovery (Python 3.11 or newer)
#   make test         lint and all tests; those on a real Kubernetes are skipped, with the reason, where none can run
# The tests in parts (tests/README.md):
#   make unit         half a minute: units and the quick part of the simulation
#   make unit-operator  the same for the operator, the client and the dashboard alone: installs no torch
#   make test-local   everything that needs neither root nor Kubernetes
#   make test-cluster those on a real Kubernetes alone (root, Go)
#   make test-gpu     what only GPUs can show, on those of this machine; writes build/gpu-results.json
# And:
#   make matrix       the runtime's tests on every Python from 3.9 and torch from 2.6 that this machine can get;
#                     MATRIX="--python=3.9 --torch=none" chooses rows, MATRIX=--all takes every pair and all tests
#   make lint         ruff, mypy, import-linter
#   make locks        renew the lock files, by which CI (LOCKED=1), the images and the release install
#   make docs         the documentation as a site in build/site, links checked; no network
#   make cluster-up   start the test cluster, or find it running; prints how to use it (root, Go)
#   make cluster-down
#   make demo-cluster digits on the test cluster, by Helm and kubectl
PYTHON ?= python3
VENV ?= .venv
# An index of smaller torch wheels (CPU only), where one can be reached.
TORCH_INDEX_URL ?=
# 1: the versions and hashes of locks/dev.txt, as in CI. Otherwise the newest that pyproject.toml allows.
LOCKED ?=
# More of pytest's options, for instance: make test PYTEST=--durations=20
PYTEST ?=
# Options of make matrix.
MATRIX ?=
# Tests that run at once: twice the processors of a small machine, since many wait for a process or a timer.
WORKERS ?= 4
# The same for the cluster's tests: each has a cluster of its own.
CLUSTERS ?= 3

# Bytecode is written at the first import: compiling all of torch and sympy would take a minute for modules that nobody imports. Where the
# environment forbids to write it, each process would compile what it imports, which doubles the time that torch takes.
unexport PYTHONDONTWRITEBYTECODE
INSTALL = $(VENV)/bin/python scripts/install.py
# uv checks the hashes of a constraint, too. pip refuses a checkout beside hashes, so nothing is installed without uv.
LOCK = $(if $(LOCKED),--constraint locks/dev.txt)
TORCH = $(if $(LOCKED),$(shell grep -oE '^torch(vision)?==[0-9.]+' locks/dev.txt),"torch>=2.6,<3" "torchvision>=0.21,<1")
DEMO_READY = $(VENV)/.ddpjob-demo
DEV_READY = $(VENV)/.ddpjob-dev
OPERATOR_READY = $(VENV)/.ddpjob-operator
IN_VENV = $(VENV)/bin/python -m
# A module runs in one worker, in the order of tests/conftest.py: pytest-xdist's own order leaves modules of few long tests for the end.
TESTS = $(IN_VENV) pytest --dist=loadfile --no-loadscope-reorder $(PYTEST)
# Two workers per processor, since half of the time is spent waiting; and each takes single tests of others' modules at the end.
QUICK_TESTS = $(TESTS) --dist=worksteal --numprocesses=$(shell expr 2 \* $$(getconf _NPROCESSORS_ONLN)) -m "not slow"
TESTCLUSTER = PYTHONPATH=tests:tests/cluster $(IN_VENV) testcluster

.PHONY: help demo unit unit-operator test-local test-cluster test test-gpu matrix lint locks docs cluster-up cluster-down demo-cluster

help:
	@sed -n '/^[^#]/q; s/^# \{0,1\}//p' Makefile

demo: $(DEMO_READY)
	$(IN_VENV) scripts.demo examples/digits.yaml

unit: $(DEV_READY)
	$(QUICK_TESTS) tests/unit tests/simulation $(wildcard tests/runtime)

# Torch is hidden where it is installed: a test that imports it fails here on every machine, not in a small environment alone.
unit-operator: $(OPERATOR_READY)
	DDPJOB_WITHOUT_TORCH=1 $(QUICK_TESTS) tests/unit tests/simulation tests/controller

test-local: $(DEV_READY)
	$(TESTS) --numprocesses=$(WORKERS) -m "not cluster"

test-cluster: $(DEV_READY)
	$(TESTS) --numprocesses=$(CLUSTERS) tests/cluster

# In two parts: tests that keep the processor busy would disturb those of the cluster, which measure how fast it reacts.
# The chart's tests take the Helm of the cluster: where the second part built the first one, they run once more.
# What failed is named at the very end: the output is long, and who reads a CI's record sees its last lines.
test: SHELL = /bin/bash -o pipefail
test: lint
	@mkdir -p build
	$(TESTS) --numprocesses=$(WORKERS) -m "not cluster" | tee build/tests-local.txt; local=$$?; \
	$(TESTS) --numprocesses=$(CLUSTERS) tests/cluster | tee build/tests-cluster.txt; cluster=$$?; chart=0; \
	if grep -q "test cluster's is not built" build/tests-local.txt; then \
	$(TESTS) tests/unit/test_chart.py | tee -a build/tests-cluster.txt; chart=$$?; fi; \
	grep -hE "^(FAILED|ERROR) |^=+ .*(passed|failed|error).* =+$$" build/tests-local.txt build/tests-cluster.txt; \
	exit $$((local || cluster || chart))

test-gpu: $(DEV_READY)
	$(IN_VENV) pytest -m gpu $(PYTEST) tests/gpu

# Its rows have environments of their own: neither torch nor any other package is needed here.
matrix: | $(VENV)/bin/python
	TORCH_INDEX_URL="$(TORCH_INDEX_URL)" $(VENV)/bin/python scripts/matrix.py $(MATRIX)

lint: $(DEV_READY)
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) mypy operator/ddpjob runtime/ddpjob_runtime runtime/ddpjob_pod runtime/ddpjob_report runtime/ddpjob_bucket trainer/ddpjob_trainer
	$(VENV)/bin/lint-imports

# uv is in the environment when anything has been installed there.
locks: $(DEV_READY)
	$(IN_VENV) scripts.lock

# Not --quiet: it would swallow the warnings that --strict counts. The variable silences a notice of the theme about its successor.
docs: $(DEV_READY)
	NO_MKDOCS_2_WARNING=1 $(IN_VENV) mkdocs build --strict
	@echo "build/site/index.html"

cluster-up: $(DEV_READY)
	$(TESTCLUSTER) up
	@$(TESTCLUSTER) env

cluster-down: $(DEV_READY)
	$(TESTCLUSTER) down

demo-cluster: $(DEV_READY)
	$(IN_VENV) pytest -s tests/cluster/test_example.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ddpjob needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; name another by PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(DEMO_READY): pyproject.toml | $(VENV)/bin/python
	@if [ -n "$(TORCH_INDEX_URL)" ]; then set -x; $(INSTALL) --index-url "$(TORCH_INDEX_URL)" $(TORCH); fi
	$(INSTALL) $(LOCK) -e ".[cli,trainer]"
	@touch $@

$(OPERATOR_READY): pyproject.toml | $(VENV)/bin/python
	$(INSTALL) $(LOCK) -e ".[dev-operator]"
	@touch $@

$(DEV_READY): pyproject.toml $(DEMO_READY)
	$(INSTALL) $(LOCK) -e ".[dev]"
	# The test cluster's pods see this environment read-only: what they import must have its bytecode already, or each start compiles it.
	$(VENV)/bin/python -c 'import torch, torch._dynamo, torch.distributed.run, torch.utils.data, torchvision.models, deepspeed'
	$(VENV)/bin/python -c 'import torch.distributed.fsdp, torch.distributed.pipelining, torch.distributed.rpc, sklearn.datasets, matplotlib.pyplot'
	@touch $@
