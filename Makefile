# `make` lists the targets. Each one sets up what it needs: an environment in .venv, installed once.
SHELL := bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
STAMP := $(VENV)/.installed
export PATH := $(abspath $(VENV))/bin:$(PATH)
# One thread in each process: two processes of one thread are faster than one process of two.
export OMP_NUM_THREADS ?= 1
export PE PRESET SEED SEEDS CONDITIONS CORES ARGS

.PHONY: help train study figures test install lab export docs

help: ## this list
	@echo "Usage: make <target> [NAME=value ...]"
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' Makefile | while IFS='|' read -r target what; do printf '  %-8s %s\n' "$$target" "$$what"; done

train: $(STAMP) ## train one model: PE=rope [PRESET=default] [SEED=0] [ARGS='-p epochs 3 ...' as for papermill]
	@name=$$(printf %s "$${PRESET:-default}-$${PE:-rope}-s$${SEED:-0}$$ARGS" | tr -cs 'A-Za-z0-9.=_-' _ | cut -c1-100); set -x; \
	papermill nbs/train.ipynb "runs/$$name.train.ipynb" --log-output --no-progress-bar \
	$${PE:+-p pe "$$PE"} $${PRESET:+-p preset "$$PRESET"} $${SEED:+-p seed "$$SEED"} $(ARGS) < /dev/null

study: $(STAMP) ## train and analyse every run of a preset: PRESET=default [CONDITIONS=ape,rope] [SEEDS=0,1] [CORES=2] [ARGS='-n']
	snakemake --cores "$${CORES:-2}" --nolock --keep-going --rerun-incomplete --config preset="$${PRESET:-default}" \
	$${CONDITIONS:+conditions="$$CONDITIONS"} $${SEEDS:+seeds="$$SEEDS"} $(ARGS) < /dev/null

figures: $(STAMP) ## every figure of an analysis, runs/index.csv and runs/claims.csv from the saved tables
	python -c "from vitposnb.redraw import rebuild; print(rebuild())"

test: $(STAMP) ## run the tests, two at a time [ARGS='-k name' as for pytest]
	pytest -n 2 --dist worksteal $(ARGS) < /dev/null

install: $(STAMP) ## create the environment: editable, with the dev, docs and sweep extras
	@echo "ready: source $(VENV)/bin/activate"

lab: $(STAMP) ## open JupyterLab
	jupyter lab nbs

export: $(STAMP) ## notebooks -> vitposnb/ and README.md; clean the notebooks
	nbdev_export
	nbdev_clean
	python -c "from vitposnb.docs import readme; readme()"

docs: $(STAMP) ## build the site into _docs/, readable without a network
	python -c "from vitposnb.docs import build_site; print('open', build_site() / 'index.html')"

$(STAMP): settings.ini setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt -e '.[dev,docs,sweep]'
	@touch $@
