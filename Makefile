# Each target sets up what it needs (scripts/environment.py), then does its job.
PYTHON ?= python3
ARGS ?=
CASES ?= cases/ci.yaml
RUN ?=
RUNTIME = $$($(PYTHON) scripts/environment.py)
DEV = $$($(PYTHON) scripts/environment.py dev)

.PHONY: bench test validate report lint format clean

bench: ## time the layer on this machine's case file and write an HTML report
	@py=$(RUNTIME) && $$py -m megabench bench $(ARGS)

test: ## run the test suite
	@py=$(DEV) && OMP_NUM_THREADS=1 $$py -m pytest -n auto $(ARGS)

validate: ## compare every stage of CASES with the golden model
	@py=$(RUNTIME) && $$py -m megabench validate --cases $(CASES) $(ARGS)

report: ## rebuild the report of RUN (the latest run by default)
	@py=$(RUNTIME) && $$py -m megabench report $(RUN) $(ARGS)

lint: ## ruff, ruff format, mypy strict
	@py=$(DEV) && $$py -m ruff check . && $$py -m ruff format --check . && $$py -m mypy

format: ## let ruff fix and format
	@py=$(DEV) && $$py -m ruff check --fix . && $$py -m ruff format .

clean: ## remove what builds and runs leave behind (tracked baselines stay)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find reports -mindepth 1 -maxdepth 1 ! -name baselines -exec rm -rf {} +
	find . -name __pycache__ -not -path './.venv/*' -exec rm -rf {} +
