# Every target works on a fresh machine that has Python (3.10 or later; pinned for 3.11), pip and make: the first one sets .venv up.
.DEFAULT_GOAL := help
.PHONY: help install demo plan test test-all lint format bench report reproduce smollm2 mutants clean

PYTHON ?= $(shell for p in python3 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
STAMP := .venv/.installed
REAL := .venv/.installed-real
JOBS ?= 2
# One thread per test process: with two processes on two cores, threads would only wait for each other.
SINGLE := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# torch comes first and alone, so that the resolver settles on its plain build before any other package can ask for one.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install -e '.[dev]' -c constraints.txt
	touch $@

$(REAL): $(STAMP)
	$(BIN)/python -m pip install -e '.[real]' -c constraints.txt
	touch $@

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## set .venv up

demo: $(STAMP) ## every method next to exact attention: a table and demo.png
	$(BIN)/nearfield demo --out demo.png

plan: $(STAMP) ## the sizes that the theorems ask for
	$(BIN)/nearfield plan --n 131072 --eps 0.05 --delta 0.01

test: $(STAMP) ## the tests, without those marked slow
	$(SINGLE) $(BIN)/python -m pytest -n $(JOBS) -m "not slow"

test-all: $(STAMP) ## all the tests
	$(SINGLE) $(BIN)/python -m pytest -n $(JOBS)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## all the benchmarks, more than an hour on two quiet cores; JSON under benchmarks/results, figures under docs/figures
	set -e; for script in benchmarks/bench_*.py; do echo "$$script"; $(BIN)/python $$script; done

report: $(STAMP) ## the page about the experiments, built from the committed results: experiments/report.html
	$(BIN)/python -m experiments report

reproduce: $(STAMP) ## the paper's experiments again, on the GPU too if there is one, and a page about them, in experiments/again; goes on where it was stopped
	$(BIN)/python -m experiments all --time-limit 100 --out experiments/again
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(BIN)/python -m experiments all --device cuda --time-limit 10 --out experiments/again; fi
	$(BIN)/python -m experiments report --out experiments/again

smollm2: $(REAL) ## fetch SmolLM2-135M into models/, for the benchmarks on real queries, keys and values
	$(BIN)/python benchmarks/fetch_smollm2.py

mutants: $(STAMP) ## break the library in known ways; every break must fail a test
	$(BIN)/python tools/mutants.py

clean: ## remove what can be made again
	rm -rf .venv .pytest_cache .hypothesis .mypy_cache .ruff_cache dist build demo.png
