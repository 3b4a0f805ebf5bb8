# make quickstart: install the overlay into a real vLLM tree, look at it, verify it (no GPU, no torch needed)
# make test:       everything CI runs
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= $(shell scripts/pythons.sh | sed -n 1p | cut -f 2)
VENV := .venv
RELEASE := 0.33.0
TREE := .quickstart/vllm-$(RELEASE)

.DEFAULT_GOAL := quickstart
.PHONY: quickstart test lint clean

quickstart: $(VENV)/.installed
	@echo "== 1. install: fetches vLLM $(RELEASE) with pip (340 MB, the first time only) and unpacks its Python files"
	@$(VENV)/bin/deepinfer install --wheel $(RELEASE) --into $(TREE) --arch sm80 --yes
	@echo
	@echo "== 2. status"
	@$(VENV)/bin/deepinfer status --target $(TREE)
	@echo
	@echo "== 3. verify, with what this machine has"
	@$(VENV)/bin/deepinfer verify --target $(TREE)
	@echo
	@echo "== to take every byte back: $(VENV)/bin/deepinfer rollback --target $(TREE) --yes"
	@echo "== to use it on your own vLLM: $(VENV)/bin/deepinfer install --python /path/to/your/python"

$(VENV)/.installed: pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "DeepInfer needs CPython 3.10 or newer with the venv module" >&2; exit 1; }
	@echo "== installing DeepInfer into $(VENV) (no torch, no vLLM: a few MB)"
	@"$(PYTHON)" -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

test:
	@scripts/run_tests.sh

lint:
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) $(VENV)-3.* .quickstart
