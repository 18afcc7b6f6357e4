# Two commands to begin with:
#   make demo    trains digits on this machine, kills a node in the middle, shows that it goes on. Needs Python 3.11 or newer, nothing else.
#   make test    all tests. Those on a real Kubernetes build and start it; where the machine cannot run one they are skipped with the reason.
PYTHON ?= python3
VENV ?= .venv
# An index of smaller torch wheels (CPU only), where one can be reached.
TORCH_INDEX_URL ?=
# More of pytest's options, for instance: make test PYTEST='-m "not cluster"'
PYTEST ?=

# Bytecode is written at the first import: compiling all of torch and sympy would take a minute for modules that nobody imports. Where the
# environment forbids to write it, each process would compile what it imports, which doubles the time that torch takes.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL = $(VENV)/bin/python -m pip --disable-pip-version-check install --no-compile
DEMO_READY = $(VENV)/.ddpjob-demo
DEV_READY = $(VENV)/.ddpjob-dev
IN_VENV = $(VENV)/bin/python -m
TESTCLUSTER = PYTHONPATH=tests/cluster $(IN_VENV) testcluster

.PHONY: help demo test lint cluster-up cluster-down demo-cluster

help:
	@sed -n '2,3s/^# //p' Makefile
	@echo '  make lint, cluster-up, cluster-down, demo-cluster (digits on the test cluster, by Helm and kubectl)'

demo: $(DEMO_READY)
	$(IN_VENV) ddpjob.cli.demo examples/digits.yaml

test: lint
	$(IN_VENV) pytest $(PYTEST)

lint: $(DEV_READY)
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) mypy operator/ddpjob trainer/ddpjob_trainer
	$(VENV)/bin/lint-imports

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
	@if [ -n "$(TORCH_INDEX_URL)" ]; then set -x; $(PIP_INSTALL) --index-url "$(TORCH_INDEX_URL)" "torch>=2.6,<3" "torchvision>=0.21,<1"; fi
	$(PIP_INSTALL) -e ".[cli,trainer]"
	@touch $@

$(DEV_READY): pyproject.toml $(DEMO_READY)
	$(PIP_INSTALL) -e ".[dev]"
	# The test cluster's pods see this environment read-only: what they import must have its bytecode already, or each start compiles it.
	$(VENV)/bin/python -c 'import torch, torch._dynamo, torch.distributed.run, torch.utils.data, torchvision.models, deepspeed'
	$(VENV)/bin/python -c 'import torch.distributed.fsdp, torch.distributed.pipelining, torch.distributed.rpc, sklearn.datasets, matplotlib.pyplot'
	@touch $@
