# `make test` and `make demo` need nothing but make and Python: the first of them makes an environment in .venv.
PYTHON ?= python3
VENV   ?= .venv
N      ?= 10000

BIN        := $(VENV)/bin
COMPAT     := .venv-compat
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
.PHONY: help demo test sweep bench readme prepare compat dist clean

help: ## What there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## See it work
	$(BIN)/python demo.py

test: $(VENV)/.installed ## Run the notebooks and the tests
	$(BIN)/python tests/run.py

sweep: $(VENV)/.installed ## Run N random twins (make sweep N=10000)
	$(BIN)/python tests/sweep.py $(N)

bench: $(VENV)/.installed ## Measure what a micro-batch costs
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py

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

# The oldest versions are the lower bounds in settings.ini: torch>=2.6 becomes torch==2.6.*
$(COMPAT)/.installed: $(METADATA)
	$(CHECK_PYTHON)
	@echo "Installing the oldest versions supported into $(COMPAT): the first time takes minutes and some 6 GB"
	$(PYTHON) -m venv $(COMPAT)
	sed -n 's/^requirements *= *//p' settings.ini | tr ' ' '\n' | sed 's/>=\(.*\)/==\1.*/' > $(COMPAT)/oldest.txt
	$(COMPAT)/bin/python $(PIP) -c $(COMPAT)/oldest.txt -e . pytest hypothesis wandb tensorboard accelerate
	@touch $@
