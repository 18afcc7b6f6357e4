# Start with these two commands:
#   make demo         train on digits on this machine, kill a node halfway and show the recovery (Python 3.11 or newer)
#   make test         lint and all tests; cluster tests are skipped, with the reason, on a machine that cannot run one
# Parts of the tests (tests/README.md):
#   make unit         half a minute: unit tests and the quick part of the simulation
#   make unit-operator  the same, only for the operator, the client and the dashboard; does not install torch
#   make test-local   everything that needs neither root nor Kubernetes
#   make test-cluster only the tests on a real Kubernetes cluster (root, Go)
#   make test-gpu     tests that need a GPU, on this machine's GPUs; writes build/gpu-results.json
# Other commands:
#   make matrix       the runtime's tests with every Python from 3.9 and torch from 2.6 that this machine can get;
#                     MATRIX="--python=3.9 --torch=none" selects rows, MATRIX=--all runs every pair and all tests
#   make lint         ruff, mypy, import-linter
#   make locks        renew the lock files, from which CI (LOCKED=1), the images and the release install
#   make docs         build the documentation site in build/site and check its links, without the network
#   make cluster-up   start the test cluster unless it is running, and print how to use it (root, Go)
#   make cluster-down
#   make demo-cluster train on digits on the test cluster, with Helm and kubectl
PYTHON ?= python3
VENV ?= .venv
# An index with smaller, CPU-only torch wheels, if one is available.
TORCH_INDEX_URL ?=
# 1: install the versions and hashes in locks/dev.txt, as CI does. Otherwise, install the newest
# versions that pyproject.toml allows.
LOCKED ?=
# Additional options for pytest, for example: make test PYTEST=--durations=20
PYTEST ?=
# Options for make matrix.
MATRIX ?=
# Number of parallel tests: twice the CPUs of a small machine, because many tests wait for a
# process or a timer.
WORKERS ?= 4
# The same for cluster tests: each worker has its own cluster.
CLUSTERS ?= 3

# Bytecode is written at the first import, because compiling all of torch and sympy would take a
# minute, mostly for modules that are never imported. If the environment forbids writing bytecode,
# each process compiles its imports, which doubles torch's import time.
unexport PYTHONDONTWRITEBYTECODE
INSTALL = $(VENV)/bin/python scripts/install.py
# uv also checks the hashes in a constraint file. pip refuses to install a checkout together with
# hashes, so uv is required.
LOCK = $(if $(LOCKED),--constraint locks/dev.txt)
TORCH = $(if $(LOCKED),$(shell grep -oE '^torch(vision)?==[0-9.]+' locks/dev.txt),"torch>=2.6,<3" "torchvision>=0.21,<1")
DEMO_READY = $(VENV)/.ddpjob-demo
DEV_READY = $(VENV)/.ddpjob-dev
OPERATOR_READY = $(VENV)/.ddpjob-operator
IN_VENV = $(VENV)/bin/python -m
# Each module runs in one worker, in the order set by tests/conftest.py. pytest-xdist's own order
# would run modules with few long tests last.
TESTS = $(IN_VENV) pytest --dist=loadfile --no-loadscope-reorder $(PYTEST)
# Two workers per CPU, because half of the time is spent waiting. At the end, idle workers
# take single tests from other workers' modules.
QUICK_TESTS = $(TESTS) --dist=worksteal --numprocesses=$(shell expr 2 \* $$(getconf _NPROCESSORS_ONLN)) -m "not slow"
TESTCLUSTER = PYTHONPATH=tests:tests/cluster $(IN_VENV) testcluster

.PHONY: help demo unit unit-operator test-local test-cluster test test-gpu matrix lint locks docs cluster-up cluster-down demo-cluster

help:
	@sed -n '/^[^#]/q; s/^# \{0,1\}//p' Makefile

demo: $(DEMO_READY)
	$(IN_VENV) scripts.demo examples/digits.yaml

unit: $(DEV_READY)
	$(QUICK_TESTS) tests/unit tests/simulation $(wildcard tests/runtime)

# If torch is installed, it is hidden, so that a test that imports it fails on every machine.
unit-operator: $(OPERATOR_READY)
	DDPJOB_WITHOUT_TORCH=1 $(QUICK_TESTS) tests/unit tests/simulation tests/controller

test-local: $(DEV_READY)
	$(TESTS) --numprocesses=$(WORKERS) -m "not cluster"

test-cluster: $(DEV_READY)
	$(TESTS) --numprocesses=$(CLUSTERS) tests/cluster

# Runs in two parts, because tests that keep the CPU busy would disturb the cluster tests,
# which measure reaction times. The chart tests use the test cluster's Helm: if the second part has
# just built it, they run again. Failures are listed at the very end, because the output is long and
# readers of a CI log look at its last lines.
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

# Each row has its own environment, so this one needs neither torch nor any other package.
matrix: | $(VENV)/bin/python
	TORCH_INDEX_URL="$(TORCH_INDEX_URL)" $(VENV)/bin/python scripts/matrix.py $(MATRIX)

lint: $(DEV_READY)
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) mypy operator/ddpjob runtime/ddpjob_runtime runtime/ddpjob_pod runtime/ddpjob_report runtime/ddpjob_bucket trainer/ddpjob_trainer
	$(VENV)/bin/lint-imports

# Once anything has been installed in the environment, it contains uv.
locks: $(DEV_READY)
	$(IN_VENV) scripts.lock

# --quiet would hide the warnings that --strict counts. The variable hides the theme's notice about
# its successor.
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
	# The test cluster's pods mount this environment read-only, so the bytecode of their imports must
	# exist; otherwise each start would compile it again.
	$(VENV)/bin/python -c 'import torch, torch._dynamo, torch.distributed.run, torch.utils.data, torchvision.models, deepspeed'
	$(VENV)/bin/python -c 'import torch.distributed.fsdp, torch.distributed.pipelining, torch.distributed.rpc, sklearn.datasets, matplotlib.pyplot'
	@touch $@
