# Everything a developer or CI does. `make` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CPU build of torch, so that no one downloads CUDA for a laptop. Where a configured source has the
# CPU build it is taken; else it comes from PyTorch's own index. Set TORCH_INDEX for another one.
TORCH := 2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# How many processes test at a time. A file's tests stay in one, so that what they share starts once.
TEST_PROCESSES ?= 2

# How images are built and what they are called. IMAGE_BUILD is a command that takes docker build's arguments.
IMAGE_BUILD ?= $(if $(shell docker info >/dev/null 2>&1 && echo yes),docker build,buildah build)
IMAGE_REGISTRY ?=
IMAGE_TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGES ?= cpu engine-cpu

# An interpreter that has llama_cpp, where one was named.
llama = $(if $(LLAMA_PYTHON),--llama-python $(LLAMA_PYTHON))
# Where a benchmark leaves its figures and its plot.
figures = --json docs/benchmarks/$(1).json --plot docs/benchmarks/$(1).svg

.DEFAULT_GOAL := help
.PHONY: help install up down test fmt lint type check protos proto-lint chart-schema manifests model bench bench-engine bench-kv bench-router bench-tokens bench-grammar bench-loadtest bench-simulator tables test-chaos test-slow test-browser test-clients test-k8s images image-locks chaos chaos-kv reliability clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 14

install: $(VENV)/.installed ## Make .venv with everything in it

$(VENV)/.installed: pyproject.toml
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch $(TORCH), CPU build"
	@if [ "$$(uname -s)" = Linux ]; then \
		$(BIN)/pip install -q --disable-pip-version-check "torch==$(TORCH)+cpu" 2>/dev/null || \
		$(BIN)/pip install -q --disable-pip-version-check --index-url $(TORCH_INDEX) "torch==$(TORCH)"; \
	else $(BIN)/pip install -q --disable-pip-version-check "torch==$(TORCH)"; fi
	@echo "Installing Baton and its dependencies (about a minute)"
	@$(BIN)/pip install -q --disable-pip-version-check -e '.[engine,dev]' 2>&1 | grep -v '^WARNING: Location' || true
	@$(BIN)/python -c 'import baton, torch, transformers'
	@touch $@

up: install ## Start Baton on this machine and ask it something
	@$(BIN)/baton up --detach --demo

down: ## Stop what 'make up' started
	@$(BIN)/baton down

test: install ## The default tests: no GPU, no network
	@echo "Running the default tests (a few minutes on 2 cores)"
	@$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile

test-chaos: install ## Tests that kill real processes, without the long ones
	@$(BIN)/python -m pytest -q -m 'chaos and not slow'

test-slow: install ## Tests that take long
	@$(BIN)/python -m pytest -q -m slow

test-browser: install ## Tests of the playground; need Debian's chromium and chromium-driver
	@$(BIN)/python -m pytest -q -m browser tests/browser

test-clients: install ## openai, litellm, llm, buf curl, grpcio, SMG from their own packages (pip and npm)
	@$(BIN)/python -m pytest -q -m clients tests/clients

test-k8s: install ## Tests on the cluster of KUBECONFIG; need kubectl, helm and the images BATON_IMAGE_CPU, BATON_IMAGE_ENGINE
	@$(BIN)/python -m pytest -q -m k8s tests/k8s

images: ## Build the images IMAGES="cpu engine-cpu" (engine-gpu too, if you name it) with docker or buildah
	@set -e; for target in $(IMAGES); do \
		$(IMAGE_BUILD) -f deploy/Dockerfile --target $$target \
			--build-arg VERSION=$(IMAGE_TAG) --build-arg REVISION=$$(git rev-parse HEAD 2>/dev/null || echo unknown) \
			--build-arg TORCH_INDEX=$(TORCH_INDEX) \
			-t $(IMAGE_REGISTRY)baton-$$target:$(IMAGE_TAG) .; \
	done

image-locks: install ## Resolve again what the images install (pip; downloads CUDA's wheels)
	@$(BIN)/python scripts/lock_images.py --torch $(TORCH)

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

type: install ## mypy strict
	@$(BIN)/mypy services scripts tests

check: lint type test ## What CI runs

protos: install ## Generate services/baton/v1 from protos/
	@$(BIN)/python scripts/gen_protos.py

chart-schema: install ## Make the chart's values.schema.json
	@$(BIN)/python scripts/gen_values_schema.py

manifests: install ## Make deploy/k8s/base of the chart; needs helm
	@$(BIN)/python scripts/gen_manifests.py

proto-lint: ## buf lint (needs npm)
	@npm exec --yes --package=@bufbuild/buf@1.75.0 -- buf lint

model: install ## Train the bundled model again (long)
	@PYTHONPATH=scripts $(BIN)/python -m model.train --out services/baton/models/baton-tiny

bench: install ## Measure the relay against the same engine in one process
	@$(BIN)/baton bench relay --json docs/benchmarks/relay.json
	@$(BIN)/python scripts/tables.py

bench-engine: install ## Measure the engine and its rivals (about 45 minutes; LLAMA_PYTHON=an interpreter with llama_cpp)
	@$(BIN)/baton bench engine --peers $(llama) --rounds 3 --seconds 400 $(call figures,engine)
	@$(BIN)/baton bench engine --shape 500m --rounds 1 --seconds 400 --peers $(llama) $(call figures,engine-500m)
	@$(BIN)/baton bench cost $(call figures,cost)
	@$(BIN)/baton bench batching $(call figures,batching)
	@$(BIN)/baton bench stalls $(call figures,stalls)
	@$(BIN)/python scripts/tables.py

bench-kv: install ## Measure the KV hand-over (about 4 minutes)
	@$(BIN)/baton bench kv $(call figures,kv)
	@$(BIN)/python scripts/tables.py

bench-router: install ## Measure overload, fairness, slow readers, batches and the router's own cost (about half an hour)
	@missed=0; for what in overload fairness readers router routing batch; do \
		$(BIN)/baton bench $$what --json docs/benchmarks/$$what.json || missed=1; \
	done; $(BIN)/python scripts/tables.py; exit $$missed

bench-tokens: install ## Measure tokenizer and detokenizer against their library (about 2 minutes)
	@$(BIN)/baton bench tokens $(call figures,tokens)
	@$(BIN)/python scripts/tables.py

bench-grammar: install ## Measure structured output (about 3 minutes)
	@$(BIN)/baton bench grammar $(call figures,grammar)
	@$(BIN)/python scripts/tables.py

bench-loadtest: install ## Measure the load generator itself (about a minute)
	@$(BIN)/baton bench loadtest --json docs/benchmarks/loadtest.json
	@$(BIN)/python scripts/tables.py

bench-simulator: install ## Measure the simulator (about 8 minutes; TRACE=Mooncake's conversation trace)
	@$(BIN)/baton bench simulator --trace $(TRACE) --json docs/benchmarks/simulator.json
	@$(BIN)/baton bench simulator --trace $(TRACE) --workers 1000 --copies 10 --seconds 600 \
		--block-size 512 --json docs/benchmarks/simulator-1000.json
	@$(BIN)/python scripts/tables.py

chaos: install ## Kill, stop, cut off and restart processes under load, and count (about half an hour)
	@missed=0; for schedule in kills routers partitions rolling slow-links; do \
		$(BIN)/baton chaos run --schedule $$schedule --json docs/benchmarks/chaos-$$schedule.json || missed=1; \
	done; $(BIN)/baton chaos hang --json docs/benchmarks/chaos-hang.json || missed=1; \
	$(BIN)/python scripts/tables.py; exit $$missed

reliability: chaos bench-router ## Every figure of docs/reliability.md again

chaos-kv: install ## Break hand-overs in every way and count (about half an hour)
	@$(BIN)/baton chaos kv corruptions --json docs/benchmarks/chaos-kv-corruptions.json
	@$(BIN)/baton chaos kv clean --json docs/benchmarks/chaos-kv-clean.json
	@$(BIN)/baton chaos kv freeze-kill --json docs/benchmarks/chaos-kv-freeze-kill.json
	@$(BIN)/baton chaos kv late-write --json docs/benchmarks/chaos-kv-late-write.json
	@$(BIN)/baton chaos kv cancel-storm --json docs/benchmarks/chaos-kv-cancel-storm.json
	@$(BIN)/baton chaos kv head-of-line --json docs/benchmarks/chaos-kv-head-of-line.json

tables: install ## Write the tables of docs from docs/benchmarks
	@$(BIN)/python scripts/tables.py

clean: ## Remove what can be made again
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
