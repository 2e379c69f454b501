# Everything a developer or CI does. `make` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CPU build of torch, so that no one downloads CUDA for a laptop. Where a configured source has the
# CPU build it is taken; else it comes from PyTorch's own index. Set TORCH_INDEX for another one.
TORCH := 2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# The versions that the tests were last seen to pass with, so that a release of somebody else breaks no checkout.
DEV_LOCK := deploy/locks/dev.txt

# How many processes test at a time. A file's tests stay in one, so that what they share starts once, and
# files begin in the order of tests/depth.py, the longest first.
TEST_PROCESSES ?= 2
TOGETHER = -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# Compiled modules are kept, also where the environment says otherwise, as in many images: without them every process
# that tests, and every Baton that a test starts, compiles hundreds of files again.
export PYTHONDONTWRITEBYTECODE :=

# Tests of the chart that need helm and no cluster, which have nothing to share.
CHARTS = $(addprefix tests/k8s/test_chart_,render.py refusals.py package.py)

# How images are built and what they are called. IMAGE_BUILD is a command that takes docker build's arguments.
IMAGE_BUILD ?= $(if $(shell docker info >/dev/null 2>&1 && echo yes),docker build,buildah build)
IMAGE_REGISTRY ?=
IMAGE_TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGES ?= cpu engine-cpu
# A base image instead of the one that the Dockerfile has by its digest, for a builder without a registry.
IMAGE_BASE ?=
IMAGE_ARGS = --build-arg VERSION=$(IMAGE_TAG) --build-arg REVISION=$$(git rev-parse HEAD 2>/dev/null || echo unknown) \
	--build-arg TORCH_INDEX=$(TORCH_INDEX) $(if $(IMAGE_BASE),--build-arg PYTHON=$(IMAGE_BASE))

# Where the repository is served, for links of a packaged chart; the name of a key that signs it, and its keyring.
CHART_HOME ?=
CHART_KEY ?=
CHART_KEYRING ?=

# Measures figures of docs/benchmarks by name, all of them without one, and writes the tables.
FIGURES = TRACE="$(TRACE)" CONVERSATION="$(CONVERSATION)" LLAMA="$(LLAMA)" $(BIN)/python scripts/figures.py

.DEFAULT_GOAL := help
.PHONY: help install up down test test-deep test-all fmt lint type check protos proto-lint chart-schema manifests package compiled model figures bench bench-engine bench-compiled bench-kv bench-router bench-tokens bench-grammar bench-loadtest bench-simulator bench-reality bench-scaling bench-tracing tables test-chaos test-slow test-browser test-clients test-edge test-k8s test-k8s-slow images dev-lock image-locks base-locks sbom vendor audit chaos chaos-kv reliability clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 14

install: $(VENV)/.installed ## Make .venv with everything in it

$(VENV)/.installed: pyproject.toml $(DEV_LOCK)
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch $(TORCH), CPU build"
	@if [ "$$(uname -s)" = Linux ]; then \
		$(BIN)/pip install -q --disable-pip-version-check "torch==$(TORCH)+cpu" 2>/dev/null || \
		$(BIN)/pip install -q --disable-pip-version-check --index-url $(TORCH_INDEX) "torch==$(TORCH)"; \
	else $(BIN)/pip install -q --disable-pip-version-check "torch==$(TORCH)"; fi
	@echo "Installing Baton and its dependencies (a few minutes)"
	@$(BIN)/pip install -q --disable-pip-version-check -c $(DEV_LOCK) -e '.[engine,dev]' 2>&1 | grep -v '^WARNING: Location' || true
	@$(BIN)/python -c 'import batonlm, torch, transformers'
	@touch $@

up: install ## Start Baton on this machine and ask it something
	@$(BIN)/baton up --detach --demo

down: ## Stop what 'make up' started
	@$(BIN)/baton down

test: install ## The default tests: no GPU, no network, six to eight minutes on 2 cores
	@$(BIN)/python -m pytest -q $(TOGETHER)

test-deep: install ## What the default tests leave out: every architecture, whole state machines, deaths, fuzz (about 16 minutes on 2 cores)
	@BATON_DEEP=1 $(BIN)/python -m pytest -q $(TOGETHER) \
		-m '(deep or hypothesis) and not (slow or chaos or k8s or gpu or browser or clients or edge)'

test-chaos: install ## Tests that kill real processes, without the long ones: one by one, for some of them judge who is silent
	@$(BIN)/python -m pytest -q -m 'chaos and not slow'

test-all: install ## The default and deep tests in one run, as CI does: it collects once, and waits of some are filled by others
	@BATON_DEEP=1 $(BIN)/python -m pytest -q $(TOGETHER) --durations 40 --durations-min 10 \
		-m 'not (slow or chaos or k8s or gpu or browser or clients or edge)'

test-slow: install ## Tests that take long
	@$(BIN)/python -m pytest -q -m 'slow and not k8s'

test-browser: install ## Tests of the chat page; need Debian's chromium and chromium-driver
	@$(BIN)/python -m pytest -q -m browser tests/browser

test-clients: install ## openai, anthropic, ollama, litellm, llm, buf curl, grpcio, SMG, LangChain and other agents from their own packages (pip and npm)
	@$(BIN)/python -m pytest -q -m clients tests/clients

test-edge: install ## Real proxies and clients before the HTTP edge; need Debian's nginx, haproxy, openjdk, curl
	@$(BIN)/python -m pytest -q -m edge tests/edge

test-k8s: install ## Tests on the cluster of KUBECONFIG; need kubectl, helm and the images BATON_IMAGE_CPU, BATON_IMAGE_ENGINE
	@$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) -m 'k8s and not slow' $(CHARTS)
	@$(BIN)/python -m pytest -q -m 'k8s and not slow' tests/k8s $(CHARTS:%=--ignore=%)

test-k8s-slow: install ## Tests on that cluster that take long: pools that grow and shrink under load (about 15 minutes)
	@$(BIN)/python -m pytest -q -m 'k8s and slow' tests/k8s

compiled: install ## Build build/wheel with compiled modules (gcc, Python's headers), and unpack it into build/compiled
	@rm -rf build/wheel build/compiled
	@HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/python -m hatchling build -t wheel -d build/wheel
	@$(BIN)/python -m zipfile -e build/wheel/*.whl build/compiled

images: ## Build the images IMAGES="cpu engine-cpu" (engine-gpu too, if you name it) with docker or buildah
	@set -e; for target in $(IMAGES); do \
		$(IMAGE_BUILD) -f deploy/Dockerfile --target $$target $(IMAGE_ARGS) \
			-t $(IMAGE_REGISTRY)baton-$$target:$(IMAGE_TAG) .; \
	done

dev-lock: ## Install the newest versions that pyproject.toml allows, and pin them for `make install`
	@rm -f $(VENV)/.installed
	@: > $(DEV_LOCK)
	@$(MAKE) -s install
	@$(BIN)/pip install -q --disable-pip-version-check -U --upgrade-strategy eager "torch==$(TORCH)" -e '.[engine,dev]'
	@$(BIN)/pip freeze --disable-pip-version-check --exclude-editable | grep -viE '^(torch|pip|setuptools|wheel)==' > $(DEV_LOCK)
	@touch $(VENV)/.installed

image-locks: install ## Resolve again what the images install, where pyproject.toml changed; all of it with UPGRADE=yes (pip, minutes)
	@$(BIN)/python scripts/lock_images.py --torch $(TORCH) $(if $(UPGRADE),--upgrade)

base-locks: install ## Pin again the base image (docker, skopeo or crane) and the compiler (apt), both as of today
	@$(BIN)/python scripts/lock_base.py image
	@$(BIN)/python scripts/lock_base.py compiler

sbom: install ## Write build/sbom/baton-TARGET.cdx.json of IMAGES: what is really in them (builds them first)
	@set -e; for target in $(IMAGES); do \
		$(IMAGE_BUILD) -f deploy/Dockerfile --target inventory --build-arg IMAGE=$$target $(IMAGE_ARGS) \
			--output type=local,dest=build/sbom/$$target -t baton-inventory:$(IMAGE_TAG) .; \
		$(BIN)/python scripts/sbom.py $$target --inventory build/sbom/$$target/inventory.json \
			--out build/sbom/baton-$$target.cdx.json \
			--version $(IMAGE_TAG) --revision "$$(git rev-parse HEAD 2>/dev/null || echo unknown)"; \
	done

vendor: install ## Copy the chat page's library from npm again, as it is locked; another one with MARKED=18.3.0 (npm)
	@$(BIN)/python scripts/vendor.py $(if $(MARKED),--version $(MARKED))

audit: install ## Look for published vulnerabilities in what the images install; says so where no source of advisories answers
	@$(BIN)/python scripts/audit.py $(if $(REQUIRED),--required)

fmt: install ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix -q .

lint: install ## Style, import rules, stubs in step with the protos, locks with pyproject.toml
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/gen_protos.py --check
	@$(BIN)/python scripts/tables.py --check
	@$(BIN)/python scripts/lock_images.py --torch $(TORCH) --check
	@$(BIN)/python scripts/gen_values_schema.py --check
	@$(BIN)/python scripts/gen_chart_readme.py --check

type: install ## mypy strict
	@$(BIN)/mypy services loadtest scripts tests deploy/image

check: lint type test ## What CI runs

protos: install ## Generate services/batonlm/v1 from protos/
	@$(BIN)/python scripts/gen_protos.py

chart-schema: install ## Make the chart's values.schema.json and the tables of its README
	@$(BIN)/python scripts/gen_values_schema.py
	@$(BIN)/python scripts/gen_chart_readme.py

package: install ## Package the chart into build/chart, as an OCI archive too; signed with CHART_KEY and CHART_KEYRING (helm)
	@$(BIN)/python scripts/package_chart.py --home "$(CHART_HOME)" --key "$(CHART_KEY)" --keyring "$(CHART_KEYRING)"

manifests: install ## Make deploy/k8s/base of the chart; needs helm
	@$(BIN)/python scripts/gen_manifests.py

proto-lint: ## buf lint (needs npm)
	@npm exec --yes --package=@bufbuild/buf@1.75.0 -- buf lint

model: install ## Train the bundled model again (hours; goes on where it was interrupted)
	@PYTHONPATH=scripts $(BIN)/python -m model.train --work build/model --out services/batonlm/models/baton-tiny

figures: install ## Measure everything again that README and docs state (hours; see scripts/figures.py)
	@$(FIGURES)

bench: install ## Measure the relay against the same engine in one process
	@$(FIGURES) relay

bench-engine: install ## Measure the engine and its rivals (about 45 minutes; LLAMA=a folder with libllama)
	@$(FIGURES) engine engine-500m cost batching stalls

bench-compiled: compiled ## Measure what compiled modules gain (about a minute)
	@$(FIGURES) compiled

bench-kv: install ## Measure the KV hand-over and ranks (about 6 minutes)
	@$(FIGURES) kv ranks

bench-router: install ## Measure overload, fairness, slow readers, batches and the router's own cost (about half an hour)
	@$(FIGURES) overload fairness readers router routing batch

bench-tokens: install ## Measure tokenizer and detokenizer against their library (about 2 minutes)
	@$(FIGURES) tokens

bench-grammar: install ## Measure structured output (about 3 minutes)
	@$(FIGURES) grammar

bench-loadtest: install ## Measure the load generator itself (about a minute)
	@$(FIGURES) loadtest

bench-simulator: install ## Measure the simulator (about 8 minutes; TRACE=Mooncake's conversation trace)
	@$(FIGURES) simulator simulator-1000

bench-reality: install ## Compare the simulator and `plan split` with real runs (about an hour)
	@$(FIGURES) reality split

bench-scaling: install ## Grow simulated fleets by leading signals, and by how busy they are (about 3 minutes)
	@$(FIGURES) scaling

bench-tracing: install ## Measure what tracing and metrics cost (about a quarter of an hour)
	@$(FIGURES) tracing

chaos: install ## Kill, stop, cut off and restart processes under load, and count (about an hour)
	@$(FIGURES) chaos-kills chaos-routers chaos-partitions chaos-rolling chaos-slow-links chaos-tiers chaos-hang

reliability: chaos bench-router ## Every figure of docs/reliability.md again

chaos-kv: install ## Break hand-overs in every way and count (about half an hour)
	@$(FIGURES) chaos-kv-corruptions chaos-kv-clean chaos-kv-freeze-kill chaos-kv-late-write chaos-kv-cancel-storm chaos-kv-head-of-line

tables: install ## Write the tables of docs from docs/benchmarks
	@$(BIN)/python scripts/tables.py

clean: ## Remove what can be made again
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
