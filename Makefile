# Perilune: what a fresh machine needs is `make demo` and `make test`. `make help` lists the rest.
#
# Both create .venv when needed and write only inside this folder (.venv, .cache, runs).
#   PYTHON    which Python makes .venv        (default: that of .venv, else the first of python3.13 ... python3 >= 3.11)
#   TORCH     which torch goes into it        (default: torch==2.13.0)
#   PIP_ARGS  more pip arguments for torch    (for example an --index-url with another build)
#   EXTRAS    extras of the package           (default: train,serve,swarm,scale,test)

PYTHON   ?=
TORCH    ?= torch==2.13.0
PIP_ARGS ?=
EXTRAS   ?= train,serve,swarm,scale,test
DISK_GB  ?= 6
JOBS     ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); [ "$$n" -gt 4 ] && n=4; echo "$$n")

export PYTHON TORCH PIP_ARGS EXTRAS DISK_GB
unexport PYTHONPATH PYTHONHOME

# Programs keep their caches in the home directory unless told otherwise.
CACHE := $(CURDIR)/.cache
export XDG_CACHE_HOME               := $(CACHE)
export XDG_STATE_HOME               := $(CACHE)/state
export HF_HOME                      := $(CACHE)/huggingface
export HYPOTHESIS_STORAGE_DIRECTORY := $(CACHE)/hypothesis
export MPLCONFIGDIR                 := $(CACHE)/matplotlib
export PYTEST_DEBUG_TEMPROOT        := $(CACHE)
export TORCHINDUCTOR_CACHE_DIR      := $(CACHE)/torchinductor
export TRITON_CACHE_DIR             := $(CACHE)/triton
export VIRTUAL_ENV                  := $(CURDIR)/.venv

LINT    := .venv/bin/ruff check --output-format concise .
IMPORTS := .venv/bin/lint-imports --no-logo --cache-dir .cache/import_linter
TYPES   := .venv/bin/pyrefly check --summary=none --output-format min-text
PYTEST  := env OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -o cache_dir=.cache/pytest -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-long lint types environment system-deps clean
MAKEFLAGS += --no-print-directory

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: environment ## train the recipe nano here, sample from it, write runs/nano/report.html; show the released model
	@echo "== training the recipe nano (at most 5 minutes on 2 cores)"
	@.venv/bin/perilune train nano --overwrite
	@echo "== report: runs/nano/report.html"
	@.venv/bin/python -m perilune.cli_released

test: environment ## lint, import layers, types and all short tests
	@sh make/check.sh "$(LINT)" "$(IMPORTS)" "$(TYPES)" "$(PYTEST)"

test-long: environment ## the long forms of the tests; writes benchmarks/results/test_long.json
	@echo "== long tests"
	@$(PYTEST) -m long --timeout 3600 --result-json=benchmarks/results/test_long.json

lint: environment ## style and import layers
	@$(LINT)
	@$(IMPORTS)

types: environment ## type checker
	@$(TYPES)

environment: ## create or repair .venv
	@sh make/environment.sh

system-deps: ## what some tests need from the system (Debian, root): chromium, bubblewrap, postgresql, g++
	@sh make/system_deps.sh

clean: ## remove .venv and caches, keep runs
	@rm -rf .venv .cache
	@find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
