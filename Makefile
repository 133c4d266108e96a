# make demo: train the embedded example on two processes.   make check: what to run before each commit; minutes.
# make test: all tests; half an hour on two cores.   make lint: format, and fix what ruff can.
# Everything happens in .venv, made from pyproject.toml under constraints.txt; PYTHON chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := true
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Some containers set it. Then each process compiles hftune and rewrites the assertions of all test modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check unit test suite static lint bench measured gpu gpu-rehearsal docs clean

demo: $(VENV)/.installed
	ACCELERATE_USE_CPU=true $(BIN)/accelerate launch --config_file accelerate_configs/2cpu.yaml -m hftune.run recipe=yelp_demo resume=never
	@echo "The real thing, on the Hub's Yelp reviews: $(BIN)/accelerate launch --config_file accelerate_configs/4gpu.yaml -m hftune.run recipe=yelp"

check:
	$(MAKE) --no-print-directory --jobs 2 static unit  # types are checked while pytest imports

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 3 --dist loadfile tests/unit  # some tests wait

test:
	$(MAKE) --no-print-directory --jobs 2 static suite  # types are checked while pytest imports

# Many tests wait, hence 4 workers; the long files come first, as in testpaths. Some measure time between processes, which a busy
# machine may stop for seconds: the few that fail are run once more, with nothing beside them, and must pass. Both runs are printed.
AGAIN = echo "Once more, alone:" && $(BIN)/python -m pytest -vv --last-failed --last-failed-no-failures none
suite: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder || { [ $$? -eq 1 ] && $(AGAIN); }

static: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

# Those that need no data, no GPU and no root: about 15 minutes on two cores. The figures go into benchmarks/results.
bench: $(VENV)/.installed
	for name in batch_plan gradient_scale loop_overhead parity throughput; do $(BIN)/python benchmarks/$$name.py || exit 1; done

# Every demo recipe, and more, on one and two simulated GPUs; needs a C++ compiler and PyTorch's build for CPUs.
# For one recipe: make gpu-rehearsal WORDS="-k yelp".
gpu-rehearsal: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/rehearsal --durations=0 --durations-min=1 $(WORDS)

# With an NVIDIA GPU: losses against the CPU's, SIGKILL, two GPUs, speed beside Trainer; a table. Meant to take ten minutes,
# which nobody has timed yet.
gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu.py $(WORDS)

measured: $(VENV)/.installed
	$(BIN)/python benchmarks/measured.py

# constraints.txt pins every version. The demo needs the package alone; tests and benchmarks need some 90 packages more
# (pyspark, mlflow, ...).
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV). On Linux the package index may give torch with CUDA, gigabytes of it: to get the small CPU"
	@echo "build, point pip at PyTorch's CPU wheels first (PIP_FIND_LINKS or PIP_INDEX_URL)."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	$(BIN)/python -m hftune.config.schema > recipes/hftune.schema.json  # for editors: the recipes name it
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

# The site, in site/; open site/index.html. Neither building nor reading it needs a network.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m hftune.config.reference > docs/configuration.md
	$(BIN)/python -m hftune.config.schema > recipes/hftune.schema.json
	$(BIN)/zensical build --config-file mkdocs.yml --strict --clean

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) outputs site .pytest_cache .ruff_cache
