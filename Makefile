# Each target makes its own virtual environment on first use. Override the interpreter with PYTHON=python3.12.
PYTHON ?= python3
VENV := .venv
# test processes; each takes one thread and about 1.5 GB
WORKERS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check figures notebooks bench clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "driftlab needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)  ## the main job: from a real model to the drift picture, in runs/demo/
	$(BIN)/driftlab demo

test: $(READY)  ## all tests
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

check: $(READY)  ## style, import directions, notebooks, figures
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory notebooks
	$(MAKE) --no-print-directory figures
	@if git rev-parse --git-dir >/dev/null 2>&1; then git diff --exit-code --stat -- paper_figs; fi

figures: $(READY)  ## every figure of paper_figs/ from its committed table
	$(BIN)/python -m paper_figs

notebooks: $(READY)  ## run every notebook from top to bottom; the files are not changed
	$(BIN)/python -m notebooks

bench: $(READY)  ## speed, as ratios measured side by side in one run: replay, training, probes, import
	$(BIN)/python experiments/bench.py

clean:
	rm -rf $(VENV) runs build *.egg-info
