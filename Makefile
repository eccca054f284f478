# `make test` and `make demo` need nothing but make and Python: the first of them makes an environment in .venv.
PYTHON ?= python3
VENV   ?= .venv
N      ?= 10000
PORT   ?= 8000

BIN        := $(VENV)/bin
COMPAT     := .venv-compat
PEERS      := .venv-peers
LINT       := .venv-lint
# Words in the names of the notebooks and test files that `make quick` runs
QUICK      := 00_accumulation same_run recorded refused drop_last house repository
MIN_PYTHON := $(shell sed -n 's/^min_python *= *//p' settings.ini)

# PYTHON= chooses the Python; without it an environment keeps the one it was made with
python = $(or $(if $(findstring file,$(origin PYTHON)),$(shell test -x $(1)/bin/python && $(1)/bin/python -c '' 2>/dev/null && echo $(1)/bin/python)),$(PYTHON))

# Make an environment, of a kind that tools/environment.py knows, where that has not been done
define environment
@need="fastaccum needs Python >= $(MIN_PYTHON), as in: make PYTHON=python3.12"; python=$(call python,$(2)); \
command -v $$python >/dev/null || { echo "$$need; $$python was not found"; exit 1; }; \
$$python -c 'import sys; sys.exit(sys.version_info < tuple(map(int, "$(MIN_PYTHON)".split("."))))' || \
	{ echo "$$need; $$python is `$$python -V 2>&1`"; exit 1; }; \
$$python tools/environment.py $(1) $(2) $$python
endef

.DEFAULT_GOAL := help
.PHONY: help demo test quick test-all portable faults lint jupyter sweep bench peers docs docs-serve docs-test readme prepare page hooks compat dist release clean env env-docs env-jupyter env-lint env-compat env-peers

help: ## What there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: env ## See it work
	$(BIN)/python demo.py

test: env ## Run the notebooks and the tests
	$(BIN)/python tests/run.py

quick: env ## A part of that, between edits: less than a minute
	$(BIN)/python tests/run.py $(QUICK)

test-all: env ## With whole grids, where `make test` samples them
	TESTS=all $(BIN)/python tests/run.py

portable: env ## The tests as other processors would run them, which round otherwise
	$(BIN)/python tests/run.py --portable

faults: env ## Plant faults in the package, one at a time: do the tests see each?
	$(BIN)/python tests/plant.py

lint: env-lint ## Have ruff read the code, actionlint and zizmor the workflows
	$(LINT)/bin/ruff check
	$(LINT)/bin/actionlint
	$(LINT)/bin/zizmor --offline --quiet .

jupyter: env-jupyter ## Open the guides in Jupyter
	$(BIN)/python -m notebook nbs/guides

sweep: env ## Compare N random runs with the full batch (make sweep N=10000)
	$(BIN)/python tests/sweep.py $(N)

bench: env ## Measure what a micro-batch costs
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py

peers: env-peers ## Compare with others (make peers ONLY=lightning)
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -W ignore -m benchmarks.peers $(WHAT) $(if $(ONLY),--only $(ONLY)) $(if $(NOTE),--note "$(NOTE)")

docs: env-docs ## Build the site into _docs
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore docs/build.py

docs-serve: docs ## Build the site and show it (make docs-serve PORT=8000)
	$(BIN)/python tools/serve.py $(PORT)

docs-test: docs ## Build the site and test it in a browser
	$(BIN)/python tests/run.py site

readme: ## Write README.md from nbs/index.ipynb
	$(PYTHON) tools/readme.py

prepare: env ## After editing notebooks: export, clean, messages, README
	$(BIN)/nbdev-export
	$(BIN)/nbdev-clean
	$(BIN)/python tools/messages.py
	$(BIN)/python tools/readme.py

page: env ## Run pages and save what they show (make page PAGE=images)
	$(BIN)/python tools/page.py $(PAGE)

hooks: env ## Once: git shows and merges notebooks cell by cell
	$(BIN)/python tools/hooks.py

compat: env-compat ## Run the tests with the oldest versions supported
	$(COMPAT)/bin/python -m pytest -q tests -m 'not nbdev'

dist: env ## Build and check what is uploaded
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

release: env env-docs ## Make a release, up to its tag (make release VERSION=0.3.0)
	$(BIN)/python tools/release.py $(VERSION)

clean: ## Remove what was built, but for the environments
	rm -rf build dist *.egg-info _docs _proc .pytest_cache .hypothesis models demo.png
	find fastaccum nbs tests tools benchmarks \( -name __pycache__ -o -path 'nbs/*/models' -o -path nbs/models \) -prune -exec rm -rf {} +

env:
	$(call environment,dev,$(VENV))

env-docs: env
	$(call environment,docs,$(VENV))

env-jupyter: env
	$(call environment,jupyter,$(VENV))

env-lint:
	$(call environment,lint,$(LINT))

env-compat:
	$(call environment,compat,$(COMPAT))

env-peers:
	$(call environment,peers,$(PEERS))
