# All that a fresh machine needs is Python 3.11.4 or newer with pip.
PYTHON ?= python3
# Which torch to install. The cap lets pip take a CPU build where one is offered. For another build, say
#   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cu128"
TORCH ?= "torch<2.14"
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
# sphinx-build, which stops where the language of the terminal is not installed; this does not read it.
SPHINX := $(BIN)/python -c "import sys; from sphinx.cmd.build import build_main; sys.exit(build_main(sys.argv[1:]))"

.PHONY: demo test lint types layers tests test-slow coverage docs links package clean

demo: $(VENV)/.for-use  ## the effect on real digits: 36 short runs, a table and a page
	$(BIN)/logitclip sweep quickstart
	$(BIN)/logitclip report quickstart -o quickstart.html

test: lint types layers tests docs package  ## everything that CI checks

lint: $(VENV)/.for-development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.for-development
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(VENV)/.for-development
	$(BIN)/lint-imports

tests: $(VENV)/.for-development  ## tests and doctests, without the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow"

test-slow: $(VENV)/.for-development  ## only the slow tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m slow

coverage: $(VENV)/.for-development  ## line coverage, including child processes; in docs/_build/coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow" --cov --cov-report=term --cov-report=html:docs/_build/coverage

links: $(VENV)/.for-development  ## request every external link of the site; needs the network
	$(SPHINX) -q -b linkcheck docs docs/_build/links

docs: $(VENV)/.for-development  ## the documentation site, in docs/_build/html; a warning is an error
	$(SPHINX) -q -W --keep-going -b html docs docs/_build/html

package: $(VENV)/.for-development  ## wheel and sdist, and the command line of a bare install
	rm -rf build/package
	$(BIN)/python -m build --outdir build/package .
	$(PYTHON) -m venv build/package/bare
	build/package/bare/bin/pip install --quiet $(TORCH)
	build/package/bare/bin/pip install --quiet build/package/*.whl
	build/package/bare/bin/logitclip --help
	build/package/bare/bin/logitclip bound --tau 1 --classes 10 --noise symmetric:rate=0.5
	rm -rf build/package/bare

clean:
	rm -rf $(VENV) build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11, 4) or sys.exit("Python 3.11.4 or newer is needed, this is %s. Name one: make demo PYTHON=python3.12" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)

$(VENV)/.for-use: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable ".[train,data,report]"
	@touch $@

$(VENV)/.for-development: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable ".[all]" --group dev
	@touch $@ $(VENV)/.for-use
