# Every target prints the command that it runs. See README.md.

PYTHON ?= python3
TP ?= 8
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help setup demo test check format artifacts cubin publish bench bench-build bench-load bench-start bench-store clean

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(READY) ## Make .venv with pinned versions

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[build,generate,dev]'
	mkdir -p .links/dsv2mk && for d in artifacts kernel manifests pipeline runner; do ln -sfn ../../$$d .links/dsv2mk/$$d; done
	touch $(READY)

demo: $(READY) ## Synthesise a small checkpoint, build it, decode 16 tokens, compile the kernel
	PATH="$(CURDIR)/$(BIN):$$PATH" sh tests/demo.sh

test: $(READY) ## Run all tests
	$(BIN)/python -m pytest tests

check: $(READY) ## Format and lint, types, and the fast half of the tests
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/python -m pytest tests -m 'not slow'

format: $(READY) ## Format the code
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

artifacts: $(READY) ## Build an artifact: make artifacts SNAPSHOT=... TP=8 OUT=...
	$(BIN)/dsv2mk build $(if $(SNAPSHOT),"$(SNAPSHOT)") --tp $(TP) --out "$(or $(OUT),$(error OUT is not set: make artifacts SNAPSHOT=... TP=8 OUT=...))"

cubin: $(READY) ## Compile the kernel, no GPU needed: make cubin ARTIFACT=... ARCH=sm_100a,sm_90a
	$(BIN)/dsv2mk cubin --artifact "$(or $(ARTIFACT),$(error ARTIFACT is not set: make cubin ARTIFACT=... ARCH=sm_100a))" --arch $(or $(ARCH),sm_100a)

publish: $(READY) ## Put an artifact into a store: make publish DIR=... STORE=... TAG=...
	$(BIN)/dsv2mk publish "$(or $(DIR),$(error DIR is not set: make publish DIR=... STORE=... TAG=...))" "$(or $(STORE),$(error STORE is not set: make publish DIR=... STORE=... TAG=...))" --tag "$(or $(TAG),$(error TAG is not set: make publish DIR=... STORE=... TAG=...))"

bench: $(READY) ## On a GPU, measure milliseconds a token: make bench BUNDLE=STORE::NAME
	$(BIN)/python -m dsv2mk.runner bench "$(or $(BUNDLE),$(error BUNDLE is not set: make bench BUNDLE=STORE::NAME))"

bench-build: $(READY) ## Measure the build against the plain way and a plain copy
	$(BIN)/python tests/bench_build.py

bench-load: $(READY) ## Measure loading onto a GPU: make bench-load ARTIFACT=...
	$(BIN)/python tests/bench_load.py "$(or $(ARTIFACT),$(error ARTIFACT is not set: make bench-load ARTIFACT=...))"

bench-start: $(READY) ## Measure the time to the first token on a GPU: make bench-start BUNDLE=STORE::NAME
	$(BIN)/python tests/bench_start.py "$(or $(BUNDLE),$(error BUNDLE is not set: make bench-start BUNDLE=STORE::NAME))"

bench-store: $(READY) ## Measure publish and pull against plain copies
	$(BIN)/python tests/bench_store.py

clean: ## Remove what make made: .venv, build/ with all that is in it, caches
	rm -rf .venv .links build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
