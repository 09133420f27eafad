# One way to do each thing; `make help` lists them.
PYTHON := .venv/bin/python
CACHE  := $(HOME)/.cache/pdcluster
MODEL  := $(CACHE)/smollm2-135m-instruct
KUBERNETES := $(CACHE)/kubernetes
KERNELS := $(wildcard worker/src/pdcluster_worker/model/ops/kernels/*.[ch])
VLLM   := $(CACHE)/vllm
ROUTERS := $(CACHE)/routers
# Of two cores, one would often wait with fewer: tests of processes mostly wait for them.
PROCESSES ?= 3
# A test that crashes its process is named; with a new process in its place pytest-xdist would never end.
SIDE_BY_SIDE := -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.DEFAULT_GOAL := help
.PHONY: help setup model kubernetes browser promtool charts docs run quick test test-apiserver test-page test-all clients check hooks gpu-run gpu-pack bench-peers bench-routers bench-operator lint-chart release release-images release-test cluster cluster-down e2e clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.ready ## create .venv with everything the project needs

.venv/.ready: .venv/.serves requirements-dev.txt
	@scripts/setup.sh
	@touch $@

# What `make run` needs: half of it.
.venv/.serves: scripts/setup.sh scripts/import_all.py scripts/torch_without_cuda.py constraints.txt schema/pyproject.toml operator/pyproject.toml worker/pyproject.toml simulator/pyproject.toml worker/setup.py $(KERNELS)
	@scripts/setup.sh run
	@touch $@

model: $(MODEL)/.ready ## fetch and convert the sample chat model, once, into the cache directory

$(MODEL)/.ready: scripts/fetch_model.py | .venv/.serves
	@$(PYTHON) scripts/fetch_model.py $(MODEL)

kubernetes: $(KUBERNETES)/.ready ## build the Kubernetes that tests and the test cluster run, once, into the cache directory

$(KUBERNETES)/.ready: scripts/kubernetes.sh | .venv/.ready
	@scripts/kubernetes.sh $(KUBERNETES)

browser: .venv/.browser ## Debian's chromium, and playwright into .venv: for the tests of the page (root, where chromium is missing)

.venv/.browser: scripts/browser.sh | .venv/.ready
	@scripts/browser.sh
	@touch $@

promtool: ## install Debian's Prometheus, whose promtool tests the alerts (root; its service is not started)
	@command -v promtool >/dev/null || { apt-get update -q && RUNLEVEL=1 apt-get install -y -q --no-install-recommends prometheus; } >/dev/null \
	    || echo "promtool: install Debian's package prometheus as root; without it the tests of alerts are skipped"

charts: setup ## after a change of schema/, the sample cluster or pdctl: the CRDs, the chart's copies, docs/reference.md and docs/cli.md
	@$(PYTHON) scripts/crds.py
	@$(PYTHON) scripts/chart_copies.py
	@$(PYTHON) scripts/reference.py
	@$(PYTHON) scripts/cli_page.py

docs: .venv-docs/.ready ## build the documentation site into site/, strict: no dead link or anchor, no page without a place; after make browser with pictures
	@if [ -e .venv/.browser ] && [ -e $(MODEL)/.ready ]; then $(PYTHON) scripts/page_pictures.py .venv-docs/pictures || echo "docs: without pictures of the page"; fi
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

.venv-docs/.ready: requirements-docs.txt
	@python3 -m venv .venv-docs
	@.venv-docs/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

run: .venv/.serves model ## serve examples/chat.yaml: prefill and decode workers on this machine
	@.venv/bin/pdctl up examples/chat.yaml

# A container may set it, and then each of hundreds of processes compiles all that it imports.
quick test test-apiserver: export PYTHONDONTWRITEBYTECODE :=

quick: setup ## thousands of tests without processes and torch, in less than a minute: the loop while you write
	@$(PYTHON) -m pytest --quick -q -n auto

test: setup model ## all tests that need no Kubernetes, in PROCESSES side by side (3)
	@$(PYTHON) -m pytest --ignore tests/apiserver $(SIDE_BY_SIDE)

test-apiserver: setup kubernetes ## the tests against a real API server
	@$(PYTHON) -m pytest tests/apiserver $(SIDE_BY_SIDE)

test-page: setup model browser ## the tests of the page in a real Chromium; `make test` skips them where there is none
	@$(PYTHON) -m pytest tests/worker/server/page tests/system/test_page.py

test-all: promtool test test-apiserver ## all tests

clients: setup model ## every block of docs/clients.md, with its library from the registry (15 minutes, 8 GB for a while); CLIENTS='--only langchain'
	@$(PYTHON) scripts/clients.py $(CLIENTS)

check: setup ## format, lint, types, import directions, words, sizes, duplicates and generated files
	@scripts/check.sh

hooks: setup ## run the fast part of make check before each commit
	@git config core.hooksPath .githooks

bench-peers: setup model $(VLLM)/.ready ## ours beside vLLM and Hugging Face, in one run; BENCH='--only mixed vllm --workload A' for a part
	@$(PYTHON) bench/run.py $(BENCH)

$(VLLM)/.ready: bench/peers/install_vllm.sh | .venv/.ready
	@bench/peers/install_vllm.sh $(VLLM)

bench-routers: setup model $(ROUTERS)/.ready ## what routing costs, ours beside sglang-router, smg and vllm-router, in one run
	@$(PYTHON) bench/routing_overhead.py $(BENCH)

$(ROUTERS)/.ready: bench/peers/install_routers.sh | .venv/.ready
	@bench/peers/install_routers.sh $(ROUTERS)

gpu-run: setup ## on a machine with a GPU: its operations against the reference, times beside the roofline and other kernels; GPU='--parts steps'
	@$(PYTHON) scripts/gpu_run.py $(GPU)

gpu-pack: setup ## into .gpu: what gpu_run.py wants on a GPU machine that has no registries
	@scripts/gpu_pack.sh .gpu

bench-operator: setup kubernetes ## the operator with 100 PDClusters on a real API server, 10 minutes of it at rest; logged
	@$(PYTHON) bench/operator_scale.py --objects 100 --rest-seconds 600 --log

# yamllint's default rules, but for lines of any length, are those of `ct lint` or stricter.
lint-chart: setup ## the chart by the rules of `ct lint`, without ct (docs/releasing.md)
	@.venv/bin/uv tool run --quiet --from yamllint==1.38.0 yamllint --strict $(wildcard charts/pdcluster/*.yaml) \
	    -d '{extends: default, rules: {line-length: disable, document-start: disable, indentation: {indent-sequences: whatever}}}'
	@.venv/bin/helm lint --strict charts/pdcluster

release: lint-chart ## wheels, the chart's archive, bills of materials and checksums into dist/ (docs/releasing.md)
	@scripts/release.sh dist

release-images: setup ## both images as OCI archives into dist/, with buildah; BASE_IMAGE=, PLATFORMS=linux/amd64,linux/arm64
	@scripts/release_images.sh dist

release-test: release model ## install dist/ into an environment of its own, outside of this folder, and ask a model that it serves
	@scripts/release_test.sh dist $(MODEL)

cluster: setup model kubernetes ## start a one-node Kubernetes with both images and the sample model (root, Debian)
	@$(PYTHON) -m e2e.rig up

cluster-down: ## end the cluster and remove every trace of it
	@$(or $(wildcard $(PYTHON)),python3) -m e2e.rig down

e2e: setup model kubernetes ## all tests on a real cluster: the one that is up, one made for them, or PDCLUSTER_KUBECONFIG's
	@$(PYTHON) -m pytest e2e

clean: ## remove .venv and every cache in this folder
	rm -rf .venv .venv-docs site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
