# One way to do each thing; `make help` lists them.
PYTHON := .venv/bin/python
CACHE  := $(HOME)/.cache/pdcluster
MODEL  := $(CACHE)/smollm2-135m-instruct

.DEFAULT_GOAL := help
.PHONY: help setup model proto run test check bench clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.ready ## create .venv with everything the project needs

.venv/.ready: scripts/setup.sh scripts/proto.sh constraints.txt requirements-dev.txt operator/pyproject.toml worker/pyproject.toml worker/proto/pdcluster_worker/proto/worker.proto
	@scripts/setup.sh
	@touch $@

model: $(MODEL)/.ready ## fetch and convert the sample chat model, once, into the cache directory

$(MODEL)/.ready: | .venv/.ready
	@$(PYTHON) scripts/fetch_model.py $(MODEL)

proto: setup ## generate the gRPC code again after a change of worker/proto
	@scripts/proto.sh

run: setup model ## serve examples/laptop.yaml: prefill and decode workers on this machine
	@.venv/bin/pdctl up examples/laptop.yaml

test: setup model ## all tests
	@$(PYTHON) -m pytest

check: setup ## format, lint, types, import directions, sizes and duplicates
	@scripts/check.sh

bench: setup model ## our mixed and 1P1D beside Hugging Face generate(), in one run
	@$(PYTHON) bench/run.py

clean: ## remove .venv and every cache in this folder
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
