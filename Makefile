# Each target makes its own virtual environment on first use. Override the interpreter with PYTHON=python3.12.
PYTHON ?= python3
VENV := .venv
# test processes; each takes one thread and about 1.5 GB
WORKERS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check figures notebooks docs bench audit clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "driftlab needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)  ## the main job: from a real model to the drift picture, in runs/demo/
	$(BIN)/driftlab demo

test: $(READY)  ## all tests
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

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

docs: $(READY)  ## the API reference, from the docstrings: docs/api/driftlab.html
	$(BIN)/python docs/build_api.py

bench: $(READY)  ## speed, as ratios measured side by side in one run: replay, training, probes, import
	$(BIN)/python experiments/bench.py

audit: $(READY)  ## known faults of what is installed, by pip-audit, where the index and its advisories can be reached
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip-audit>=2.7' \
	  || { echo 'audit: NOT DONE, pip-audit cannot be had from the package index'; exit 1; }
	@$(BIN)/python -m pip_audit --skip-editable --progress-spinner off --timeout 15 >$(VENV)/audit.txt 2>&1; \
	  status=$$?; cat $(VENV)/audit.txt; \
	  if grep -q 'could not be audited' $(VENV)/audit.txt || [ $$status -gt 1 ]; then \
	    echo 'audit: NOT DONE for what is listed above, whose advisories cannot be reached from here'; exit 1; \
	  fi; exit $$status

clean:
	rm -rf $(VENV) runs build docs/api *.egg-info
