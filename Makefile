# Each target does its own set-up: it finds a Python, makes a virtual environment in .venv and
# installs into it what it needs, and no more. Works with GNU make 3.81, which macOS has.
#
#   BACKEND=cuda13     on Linux with an NVIDIA GPU (the default there is cpu; macOS has one build)
#   PYTHON=/path/to/python3.12     instead of the first one found that fits
#   ARGS="…"           more arguments for expert-net demo, pytest or tests.bench

.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
# Two installations into one environment at once would break it.
.NOTPARALLEL:
SHELL := /bin/sh

CANDIDATES := $(or $(PYTHON),python3.12 python3.11 python3.13 python3)
SYSTEM := $(shell uname -s)

ifeq ($(SYSTEM),Darwin)
  BACKEND :=
else
  BACKEND ?= cpu
endif

# The CPU and the CUDA build of MLX overwrite each other's files, so each has an environment.
VENV := .venv$(if $(filter-out cpu,$(BACKEND)),-$(BACKEND))
BIN := $(VENV)/bin
CREATED := $(VENV)/.created
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools

# $(call install,EXTRAS) installs this checkout, editable, with a list of extras that may be empty.
comma := ,
empty :=
extras = $(if $(strip $(1)),[$(subst $(empty) $(empty),$(comma),$(strip $(1)))])
define install
echo "make: installing expert-network$(extras) into $(VENV), once; this takes a few minutes" && \
$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.$(extras)'
endef

FITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

.PHONY: help demo test check bench format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(INSTALLED) ## Tell a story through two nodes on this machine
	@$(BIN)/expert-net demo $(ARGS)

test: $(TOOLS) ## Run the tests
	$(BIN)/pytest $(ARGS)

check: $(TOOLS) ## Format, lint, types, import contracts, then the tests: what CI runs
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/pytest $(ARGS)

bench: $(TOOLS) ## Measure against llama.cpp and mlx-lm (an hour, 20 GB)
	$(BIN)/python -m tests.bench $(ARGS)

format: $(TOOLS) ## Format the code and mend what the linter can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean: ## Remove the environments, caches and builds
	rm -rf .venv .venv-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f expert_network/kernels/_native.abi3.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A shim may be there without a Python behind it, and Debian's Python may lack venv: so try each.
$(CREATED):
	@for python in $(CANDIDATES); do \
	  if "$$python" -c '$(FITS)' >/dev/null 2>&1; then \
	    echo "make: creating $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv --clear $(VENV) && touch $@; exit; \
	  fi; \
	done; \
	echo "make: no usable Python among: $(CANDIDATES). Install Python 3.11, 3.12 or 3.13 (on" \
	  "Debian and Ubuntu also its -venv package), or name one with PYTHON=/path/to/python." >&2; \
	exit 1

# What the installation compiles.
KERNELS := hatch_build.py $(wildcard expert_network/kernels/*.[ch] expert_network/kernels/isa/*.[ch])

$(INSTALLED): $(CREATED) pyproject.toml $(KERNELS)
	@$(call install,$(BACKEND))
	@touch $@

$(TOOLS): $(CREATED) pyproject.toml $(KERNELS)
	@$(call install,$(BACKEND) dev)
	@touch $(INSTALLED) $@
