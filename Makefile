# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The first of these that is there and supported; most has been tested with the oldest. PYTHON=… names another.
PYTHON ?= python3.11 python3.12 python3.13 python3.14 python3
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
OLDEST_NUMPY := 'numpy==1.26.*; python_version < "3.13"' 'numpy==2.1.*; python_version == "3.13"' 'numpy==2.3.*; python_version > "3.13"'  # as far as there are wheels
# Only the trainer is installed beside the oldest torch: neither the operator, nor what the test cluster needs.
WITHOUT_OPERATOR := --ignore=tests/distributed/test_deciding.py --ignore=tests/distributed/test_leaf_spine.py --ignore=tests/distributed/test_watched_jobs.py
WITHOUT_SCIPY := --ignore=tests/unit/analysis/fabric/test_against_milp.py
export PYTHONUNBUFFERED := 1

# Sets the shell's variable `python`.
define find_python
for python in $(PYTHON); do if $$python -c '$(SUPPORTED)' 2> /dev/null; then break; fi; python=; done; \
if [ -z "$$python" ]; then \
	echo "make: none of $(PYTHON) is a Python 3.11 to 3.14." >&2; \
	echo "make: install one (Debian 12: apt install python3.11; Ubuntu 24.04: apt install python3.12), or name yours: make PYTHON=/path/to/python3" >&2; \
	exit 1; \
fi
endef

help: ## Show what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# uv installs (and caches outside the checkout) what pip would; the environment is made anew when pyproject.toml changes.
$(VENV)/.ready: pyproject.toml
	@echo "Python environment: installing (a few minutes the first time, seconds from the cache) ..." >&2
	@$(find_python); \
	$$python -c 'import ensurepip' 2>/dev/null || { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q $${python##*/}-venv; }; \
	echo "$$python -m venv --clear $(VENV)"; $$python -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --group dev --editable '.[operator,trainer,whatif]'
	@touch $@

# The trainer with the oldest torch and numpy that pyproject.toml allows; that torch's compiler imports setuptools.
$(OLDEST)/.ready: pyproject.toml | $(VENV)/.ready
	@echo "Python environment with the oldest torch: installing ..." >&2
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(OLDEST)
	$(BIN)/uv pip install --compile-bytecode --python $(OLDEST)/bin/python --group test --editable '.[trainer]' 'torch==2.9.0' $(OLDEST_NUMPY) setuptools
	@touch $@

python: ## Say which Python the environment is made with
	@$(find_python); echo $$python

# Other people's trainers, which tests and types need and the demo does not. torchtitan trains on GPUs only: its sources
# are read by a test, so that it needs nothing of what it would train with.
$(VENV)/.frameworks: $(VENV)/.ready
	$(BIN)/uv pip install --python $(BIN)/python --group frameworks
	$(BIN)/uv pip install --python $(BIN)/python --no-deps 'torchtitan==0.2.2'
	@touch $@

venv: $(VENV)/.ready ## Make the Python environment (.venv)

# Versions and hashes, of all platforms and supported Pythons, and no address: whoever builds says where they come from.
LOCK := $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock'
lock: venv ## Renew what images and releases are made of (locks/)
	$(LOCK) --extra operator --output-file locks/operator.txt pyproject.toml
	$(LOCK) --extra watch --output-file locks/watch.txt pyproject.toml
	$(LOCK) --group build --output-file locks/build.txt
	$(LOCK) --group sbom --output-file locks/sbom.txt
	$(LOCK) --group release --output-file locks/release.txt
	$(BIN)/python -m release lock

# A release is built with locked tools, which the environment for development has not.
RELEASE_TOOLS := build/release-tools
$(RELEASE_TOOLS)/.ready: locks/release.txt
	@echo "Tools of a release: installing (half a minute) ..." >&2
	@$(find_python); $$python -m venv --clear $(RELEASE_TOOLS)
	$(RELEASE_TOOLS)/bin/pip install --quiet --disable-pip-version-check --require-hashes --requirement locks/release.txt
	@touch $@

release: $(RELEASE_TOOLS)/.ready ## Build wheels, images, chart, and bills of materials of this commit (build/release; docs/releasing.md)
	$(RELEASE_TOOLS)/bin/python -m release build

reproduce: $(RELEASE_TOOLS)/.ready ## Build the release again, and compare it byte by byte
	$(RELEASE_TOOLS)/bin/python -m release reproduce

# Doubles of libraries for hardware that is not here are written in C.
compiler:
	@command -v cc > /dev/null || { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q gcc libc6-dev; }

# An installation builds them, too; but not where there was no compiler yet, and not anew when they have changed.
HEADERS := import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())
NATIVE := $(wildcard trainer/pacekeeper/native/*.c trainer/pacekeeper_rank/native/*.c)
RECORDER := trainer/pacekeeper/native/environment_recorder
BUILT := $(patsubst %.c,%.so,$(filter-out $(RECORDER).c,$(NATIVE))) $(RECORDER).bin
$(BUILT) &: $(NATIVE) hatch_build.py | $(VENV)/.ready compiler
	@$(BIN)/python -c '$(HEADERS)' || { $(find_python); apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q $${python##*/}-dev; }
	$(BIN)/python hatch_build.py

native: $(BUILT) ## Build the package's parts in C next to their source

cluster: venv ## Bring up a real Kubernetes with six nodes on this machine (FABRIC=1 or 2: with so many ports a node into a leaf–spine network; GANGS=1: whose scheduler knows gangs)
	$(BIN)/python -m testcluster up $(if $(FABRIC),--fabric $(FABRIC)) $(if $(GANGS),--gangs)

cluster-down: venv ## Take it down again
	$(BIN)/python -m testcluster down

# What `make test` runs, and what each part may cost, is the table in tests/run/parts.py.
PARTS := $(BIN)/python -m tests.run --direct

check: $(VENV)/.frameworks ## Style, names, layout, prose, types, import contracts (lint: the same)
	$(PARTS) style contracts types

lint: check

format: venv ## Bring the code into its standard form
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

test-unit: $(VENV)/.frameworks native ## Tests of decisions: no cluster, no ranks
	$(PARTS) unit-simulation unit

test-simulation: venv ## Disasters: the real operator in simulated clusters, 40 known ones and 20 new ones
	$(PARTS) disasters

test-distributed: $(VENV)/.frameworks native ## Real torch ranks over gloo
	$(PARTS) distributed

programs: venv  # before tests: named clusters do not reach the package registries
	@$(BIN)/python -m testcluster programs

test-cluster: programs ## The real cluster
	$(PARTS) cluster

test-torch: native $(OLDEST)/.ready ## All of the trainer's with the oldest torch
	$(OLDEST)/bin/pytest tests/unit/analysis tests/unit/trainer tests/distributed $(WITHOUT_OPERATOR) $(WITHOUT_SCIPY)

test-changed: $(VENV)/.frameworks native ## What the working tree's changes can affect, for two minutes (BASE=main: since that commit; ALL=1: to the end, with ranks and cluster)
	$(BIN)/python -m tests.run.changed $(if $(BASE),--base $(BASE)) $(if $(ALL),--all)

test: $(VENV)/.frameworks native $(OLDEST)/.ready programs ## Everything: lint, types, contracts, unit, distributed and cluster tests, disasters
	$(BIN)/python -m tests.run

SECONDS ?= 600
SEED ?= 0
fuzz: $(VENV)/.frameworks native ## Odd input at every border for SECONDS=600, from SEED=0 on (NAME=rings: at one); says which seed finds what
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED) $(if $(NAME),--border "$(NAME)")

demo: venv ## The main job: a training job that heals itself (build/demo/report.html; SCENARIO=shards: a sharded model; SCENARIO=traffic: jobs that share links)
	$(BIN)/python -m demo $(if $(SCENARIO),--scenario $(SCENARIO))

# What needs a GPU runs by the Python of the machine that has it: no environment is made, nothing is installed.
GPU_PYTHON ?= python3
FROM_CHECKOUT := PYTHONPATH=analysis:trainer

has-torch:
	@$(GPU_PYTHON) -c 'import numpy, torch' || { echo "make: $(GPU_PYTHON) has not both torch and numpy; name a Python that has: GPU_PYTHON=/path/to/python3" >&2; exit 1; }

# Beside a ring, ranks on a GPU need NCCL's plugin: a C compiler alone makes it, by the options of hatch_build.py.
PLUGIN := trainer/pacekeeper/native/nccl_profiler
has-plugin: has-torch
	@test -e $(PLUGIN).so || cc -std=c11 -O2 -shared -fPIC -fvisibility=hidden -pthread -Wl,-z,nodelete -o $(PLUGIN).so $(PLUGIN).c || { echo "make: NCCL's plugin is not built, which some of this needs; a C compiler (cc) makes it" >&2; exit 1; }

test-gpu: has-plugin ## What only a GPU can prove: one NVIDIA GPU, by a GPU_PYTHON that has torch (docs/gpu.md)
	$(FROM_CHECKOUT) $(GPU_PYTHON) -m tests.gpu

ifeq ($(NAME),gpu)
bench: has-plugin ## All benches, or one: make bench NAME=recovery
	$(FROM_CHECKOUT) $(GPU_PYTHON) -m bench gpu
else
bench: venv native
	$(BIN)/python -m bench $(NAME)
endif

.PHONY: help python venv lock release reproduce compiler native cluster cluster-down lint format check test-unit test-changed test-simulation test-distributed programs test-cluster test-torch has-torch has-plugin test-gpu test fuzz demo bench
