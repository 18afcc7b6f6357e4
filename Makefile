# make demo: trains digits on this machine, kills a node in the middle, shows that it goes on. Needs Python 3.11 or newer, nothing else.
PYTHON ?= python3
VENV ?= .venv
# An index of smaller torch wheels, for instance https://download.pytorch.org/whl/cpu
TORCH_INDEX_URL ?=

# Bytecode is written at the first import: compiling all of torch and sympy would take a minute for modules that nobody imports.
PIP_INSTALL = $(VENV)/bin/python -m pip --disable-pip-version-check install --no-compile
DEMO_READY = $(VENV)/.ddpjob-demo

.PHONY: demo
demo: $(DEMO_READY)
	$(VENV)/bin/python -m ddpjob.cli.demo examples/digits.yaml

$(DEMO_READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ddpjob needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; name another by PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	@if [ -n "$(TORCH_INDEX_URL)" ]; then set -x; $(PIP_INSTALL) --index-url "$(TORCH_INDEX_URL)" "torch>=2.6,<3" "torchvision>=0.21,<1"; fi
	$(PIP_INSTALL) -e ".[cli,trainer]"
	@touch $@
