# Everything a fresh machine needs is Python 3.11 or newer with pip.
PYTHON ?= python3
# Which torch to install. The cap lets pip pick a CPU build where one is offered; for another build, say
#   make TORCH="torch --index-url https://download.pytorch.org/whl/cu128" demo
TORCH ?= torch<2.14
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types layers tests test-slow package clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(if $(findstring --,$(TORCH)),$(TORCH),"$(TORCH)")

$(VENV)/.installed-base: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable ".[train,data,report]"
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@ $(VENV)/.installed-base
