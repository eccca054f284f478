# `make test` and `make demo` need nothing but make and Python: the first of them makes an environment in .venv.
PYTHON ?= python3
VENV   ?= .venv
N      ?= 10000

BIN        := $(VENV)/bin
COMPAT     := .venv-compat
PEERS      := .venv-peers
MIN_PYTHON := $(shell sed -n 's/^min_python *= *//p' settings.ini)
PIP        := -m pip --disable-pip-version-check install
METADATA   := settings.ini pyproject.toml

define CHECK_PYTHON
@need="fastaccum needs Python >= $(MIN_PYTHON), as in: make PYTHON=python3.12"; \
command -v $(PYTHON) >/dev/null || { echo "$$need; $(PYTHON) was not found"; exit 1; }; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < tuple(map(int, "$(MIN_PYTHON)".split("."))))' || \
	{ echo "$$need; $(PYTHON) is `$(PYTHON) -V 2>&1`"; exit 1; }
endef

.DEFAULT_GOAL := help
.PHONY: help demo test sweep bench peers docs docs-serve docs-test readme prepare compat dist clean

help: ## What there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## See it work
	$(BIN)/python demo.py

test: $(VENV)/.installed ## Run the notebooks and the tests
	$(BIN)/python tests/run.py

sweep: $(VENV)/.installed ## Run N random twins (make sweep N=10000)
	$(BIN)/python tests/sweep.py $(N)

bench: $(VENV)/.installed ## Measure what a micro-batch costs
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py

peers: $(PEERS)/.installed ## Compare with others (make peers ONLY=lightning)
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -W ignore -m benchmarks.peers $(WHAT) $(if $(ONLY),--only $(ONLY)) $(if $(NOTE),--note "$(NOTE)")

docs: $(VENV)/.docs ## Build the site into _docs
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore docs/build.py

docs-serve: docs ## Build the site and show it on port 8000
	$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory _docs

docs-test: docs ## Build the site and test it in a browser
	$(BIN)/python tests/run.py site

readme: ## Write README.md from nbs/index.ipynb
	$(PYTHON) tools/readme.py

prepare: $(VENV)/.installed ## After editing notebooks: export, clean, README
	$(BIN)/nbdev-export
	$(BIN)/nbdev-clean
	$(BIN)/python tools/readme.py

compat: $(COMPAT)/.installed ## Run the tests with the oldest versions supported
	$(COMPAT)/bin/python -m pytest -q tests -m 'not nbdev'

dist: $(VENV)/.installed ## Build and check what is uploaded
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

clean: ## Remove what was built, but for the environments
	rm -rf build dist *.egg-info _docs _proc .pytest_cache .hypothesis models nbs/models demo.png
	find fastaccum nbs tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.installed: $(METADATA)
	$(CHECK_PYTHON)
	@echo "Installing torch, fastai and what the tests need into $(VENV): the first time takes minutes and some 6 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python $(PIP) -q -e '.[docs]'
	@touch $@

# The oldest versions are the lower bounds in settings.ini: torch>=2.6 becomes torch==2.6.*
$(COMPAT)/.installed: $(METADATA)
	$(CHECK_PYTHON)
	@echo "Installing the oldest versions supported into $(COMPAT): the first time takes minutes and some 6 GB"
	$(PYTHON) -m venv $(COMPAT)
	sed -n 's/^requirements *= *//p' settings.ini | tr ' ' '\n' | sed 's/>=\(.*\)/==\1.*/' > $(COMPAT)/oldest.txt
	$(COMPAT)/bin/python $(PIP) -c $(COMPAT)/oldest.txt -e . pytest hypothesis wandb tensorboard accelerate
	@touch $@

# fastxtend and Composer ask for packages older than they need: they are installed without what they ask for
PEERS_NEED := benchmarks/peers/requirements.txt benchmarks/peers/no-deps.txt
$(PEERS)/.installed: $(METADATA) $(PEERS_NEED)
	$(CHECK_PYTHON)
	@echo "Installing Lightning, accelerate, transformers, Composer and fastxtend into $(PEERS): the first time takes minutes and some 7 GB"
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(PIP) -r benchmarks/peers/requirements.txt -e .
	$(PEERS)/bin/python $(PIP) --no-deps -r benchmarks/peers/no-deps.txt
	@touch $@
