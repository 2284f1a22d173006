# A fresh machine needs Python 3.11 or newer and make; everything else lands in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
TORCH  := $(shell sed -n 's/^torch==/torch==/p' constraints-dev.txt)
CLANG_FORMAT := $(BIN)/python -c 'import clang_format; clang_format.clang_format()'
CPP    := $(wildcard src/skyward/wire/csrc/*.cpp src/skyward/wire/csrc/*.h src/skyward/device/csrc/*/*.cpp src/skyward/device/csrc/*/*.h bench/*.cpp tools/*.h tests/fuzz/*.cpp tests/fuzz/*.h)
# Options for the one call that installs torch, for example an index of CPU builds.
TORCH_PIP_ARGS ?=

PIP := $(BIN)/python -m pip --disable-pip-version-check
# uv takes one minute for what pip takes four for. It does not read pip's configuration, so it is
# told the folders and indexes that stand there.
PIP_SAYS = $$($(PIP) config get global.$(1) 2>/dev/null | tr -s ' ' '$(2)')
COMMA := ,
UV_INDEX_OF_PIP = UV_DEFAULT_INDEX="$(call PIP_SAYS,index-url, )"
INSTALL = UV_FIND_LINKS="$(call PIP_SAYS,find-links,$(COMMA))" $(UV_INDEX_OF_PIP) \
	$(BIN)/uv pip install -q --python $(BIN)/python

# Written once, in place of compiled by every process that imports torch: 7 s of a processor each.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all simulate soak walks check check-python check-cpp format fuzz sanitize bench docs wheels lock audit clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install what development needs

# torch goes first and alone: resolved together with the rest, pip may pick a CUDA build of
# several gigabytes over the CPU build that its configuration offers.
$(STAMP): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("skyward needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 setup")'
	@test -x $(BIN)/python || { echo "setup: creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(PIP) -qq install -c constraints-dev.txt uv
	@echo "setup: installing $(TORCH)"
	@$(INSTALL) $(TORCH_PIP_ARGS) $(TORCH)
	@echo "setup: installing skyward and its development tools"
	@# A package called skyward is another project's; its files would be in the way of ours.
	@$(PIP) -qq uninstall -y skyward
	@$(INSTALL) -c constraints-dev.txt -e '.[dev]'
	@touch $@
	@echo "setup: done"

demo: setup  ## train a model on a worker and evaluate it here
	@$(BIN)/python examples/model_roundtrip.py

# Before any test waits for it; where there is no compiler, the tests of the device say so and skip.
COMPILE := $(BIN)/python -m skyward.device.build >/dev/null || true

# Of the tests, as long as new orders find tests that need another: `make test ORDER=1234` tries one.
# Those of `make test-all` have another each time.
ORDER ?= 570

test: setup  ## run the tests
	@$(COMPILE)
	@$(BIN)/python tests/run.py --order $(ORDER)

test-all: setup  ## run the tests in full: all dtypes of op_db, whole examples, what takes long, the newest torch
	@$(COMPILE)
	@$(INSTALL) -c constraints-dev.txt -e '.[trackers]'
	@TORCH_PIP_ARGS='$(TORCH_PIP_ARGS)' $(BIN)/python tests/run.py --all

SEEDS := 1000
# After so many seconds, no further seed begins.
LIMIT ?=

simulate: setup  ## run whole pools with SEEDS=1000 seeds in a simulated world, with faults
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(if $(LIMIT),--seconds $(LIMIT))

MINUTES := 60

soak: setup  ## run pools on real machines for MINUTES=60 with faults: nothing may grow
	@$(COMPILE)
	@$(BIN)/python -m tests.soak --minutes $(MINUTES)

WALKS := tests/test_walks.py tests/providers/test_ssh.py tests/providers/test_kubernetes.py

walks: setup  ## write the files that nine walks enter into CONTRIBUTING
	@SKYWARD_WALKS=write $(BIN)/python -m pytest -q $(WALKS) -k enters_no_file_that_is_not_listed

check: setup  ## lint, formatting, strict types
	@$(MAKE) --no-print-directory -j2 check-python check-cpp
	@echo "check: done"

check-python:
	@echo "check: ruff check"          && $(BIN)/python -m ruff check .
	@echo "check: ruff format --check" && $(BIN)/python -m ruff format --check .
	@echo "check: mypy --strict, also of the operators' types" && MYPYPATH=tools $(BIN)/python -m mypy --strict src tools tests/typing

check-cpp:
	@echo "check: clang-format" && $(CLANG_FORMAT) --dry-run --Werror $(CPP)
	@echo "check: warnings of the C++" && $(BIN)/python -m skyward.device.build --check

format: setup  ## rewrite the sources in the house format
	@$(BIN)/python -m ruff check --fix-only --quiet .
	@$(BIN)/python -m ruff format .
	@$(CLANG_FORMAT) -i $(CPP)

# For how long each, and which: link, coding, worker, peer or client; all of them if none is named.
SECONDS ?= 60
TARGET ?=

fuzz: setup  ## let fuzzers send anything to what the cores read, SECONDS each
	@$(BIN)/python tests/fuzz/run.py --seconds $(SECONDS) $(TARGET)

sanitize: setup  ## run the links' tests under the sanitizers of threads and of addresses
	@$(BIN)/python tests/fuzz/run.py --sanitize --seconds $(SECONDS)

bench: setup  ## run the benchmarks and print the table
	@$(BIN)/python bench/run.py

# build, or serve to see a page while you write it.
DOCS ?= build

docs: setup  ## build the documentation as a site into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(DOCS) --strict
	@test $(DOCS) != build || echo "docs: build/site/index.html"

# Options for tools/wheels.py, for example WHEELS="--only linux-x86_64 --torch-wheels FOLDER".
WHEELS ?=

wheels: setup  ## build wheels with compiled cores for Linux and macOS into dist/
	@$(INSTALL) -c constraints-dev.txt ziglang
	@$(BIN)/python tools/wheels.py $(WHEELS)

# Frameworks are the user's choice, torch above all: its builds have indexes and hashes of their own.
LOCKED := $(addprefix --extra ,ssh kubernetes aws otel store s3 gs sftp container server torch)

lock: setup  ## write what a release is installed with, by version and hash, for every platform
	@echo torch | $(UV_INDEX_OF_PIP) $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes \
		-c constraints-dev.txt --excludes /dev/stdin $(LOCKED) --custom-compile-command 'make lock' \
		-o requirements-release.txt pyproject.toml

audit: setup  ## look up what a release is installed with among known vulnerabilities
	@$(UV_INDEX_OF_PIP) $(BIN)/python tools/audit.py requirements-release.txt -- \
		$(BIN)/uv tool run -q -c constraints-dev.txt pip-audit

clean:  ## remove caches and build outputs, keep .venv
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests examples bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
