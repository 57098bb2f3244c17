# Each target does all the set-up it needs, in .venv and nowhere else; a second call installs nothing.
#   make lab        open the workbook in JupyterLab      (ARGS=--no-browser prints the address)
#   make run        execute every lesson                 (a table at the end; one alone: .venv/bin/dxdy run 03)
#   make test       what CI runs                         make test-all: everything, before work is called done
#   make cases      every re-created fault, its twin, and what only looks odd, on other random numbers (SEED=1)
#   make notebooks  rebuild the lessons from their sources (NAMES="02_hand_check")
#   make stress     kill training processes at random   (KILLS=20)
#   make site       the lessons and the reference as pages, in build/site
#   make bench      what it costs and finds beside other tools, in benchmarks/REPORT.md (ARGS=--quick)
#   make nbval      compare every lesson with its stored outputs (NB=notebooks/02_hand_check.ipynb)

PYTHON ?= python3
BIN := .venv/bin
PY := $(BIN)/python
ARGS ?=
NAMES ?=
SEED ?= 1
NB ?= $(wildcard notebooks/*.ipynb)
KILLS ?= 20
PYTEST := $(PY) -m pytest -q

# What runs is .venv and this folder, whatever else is active where make is called.
unexport VIRTUAL_ENV PYTHONPATH

# Several threads gain nothing on nets as small as these, and on a busy machine they cost up to ten times the time.
lab run test test-all unit cases stress notebooks nbval bench bench-watch: export OMP_NUM_THREADS ?= 1

.PHONY: lab run test test-all lint unit cases stress notebooks notebooks-check nbval bench bench-watch site clean

lab: .venv/.installed
	$(BIN)/dxdy lab $(ARGS)

run: .venv/.installed
	$(BIN)/dxdy run --all $(ARGS)

test: lint notebooks-check unit nbval

test-all: lint notebooks-check nbval stress .venv/.installed-peers .venv/.installed-site
	$(PYTEST)

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(PY) tests/size.py

unit: .venv/.installed-test
	$(PYTEST) -m "not slow"

cases: .venv/.installed-test
	CASES_SEED=$(SEED) $(PYTEST) tests/test_cases.py

stress: .venv/.installed-test
	$(PY) tests/stress.py --kills $(KILLS)

notebooks: .venv/.installed
	$(PY) notebooks/src/build.py $(NAMES)

notebooks-check: .venv/.installed
	$(PY) notebooks/src/build.py --check $(NAMES)

nbval: .venv/.installed-test
	PYTHONPATH=tests $(PYTEST) -p nbval_strict --nbval --nbval-current-env --nbval-cell-timeout=300 $(NB)

# Beside other tools, which only this needs, in .venv-bench: about 15 minutes on two quiet cores; ARGS=--quick: 5.
bench: .venv-bench/.installed
	@echo "Benchmarks beside other tools, into benchmarks/REPORT.md: about 15 minutes; make bench ARGS=--quick: 5."
	.venv-bench/bin/python benchmarks/report.py $(ARGS)

bench-watch: .venv-bench/.installed
	.venv-bench/bin/python benchmarks/watch.py $(ARGS)

# A warning is an error: a link that leads nowhere, a name that is not there.
site: .venv/.installed-site
	$(BIN)/sphinx-build -q -W --keep-going -b html -c docs . build/site
	@echo "build/site/docs/index.html"

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, as $(PYTHON). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Making .venv and installing into it: a few minutes and about 1.5 GB, once."
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PY) -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/.installed-test: .venv/.installed
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	@touch $@

.venv/.installed-peers: .venv/.installed-test
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[test,peers]"
	@touch $@

.venv/.installed-site: .venv/.installed
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[site]"
	@touch $@

.venv-bench/.installed: pyproject.toml constraints.txt
	@echo "Making .venv-bench, with the tools to compare with: a few minutes and about 2 GB, once."
	$(PYTHON) -m venv .venv-bench || { rm -rf .venv-bench; exit 1; }
	.venv-bench/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[bench]"
	@touch $@

clean:
	rm -rf .venv .venv-bench .mypy_cache .pytest_cache .ruff_cache build dxdy_nb.egg-info
