# Everything runs in a virtual environment of its own: one for each megatron-core version, and one for
# each older torch (TORCH=2.6.0), on which only the tests of the tools run.
MEGATRON_CORE ?= 0.19.2
TORCH ?=
PYTHON ?= python3.12
VENV ?= .venv$(if $(filter-out 0.19.2,$(MEGATRON_CORE)),-$(MEGATRON_CORE))$(if $(TORCH),-torch-$(TORCH))
# The others train, for which core needs a newer torch, and Triton a GPU's driver.
TOOLS := $(filter-out %_real.py,$(wildcard $(addprefix tests/unit_tests/tools/checkpoint/, \
    test_weighted_merge*.py test_merge_*.py common/test_*.py)))
TESTS ?= $(if $(TORCH),$(TOOLS))
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-te test-upstream lint clean

demo: $(READY)
	$(BIN)/python -W ignore examples/demo.py demo

test: $(READY)
	$(BIN)/python -m pytest $(TESTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): tests/requirements.txt
	$(PYTHON) -m venv $(VENV)
	sed $(if $(TORCH),'s/^torch==.*/torch==$(TORCH)/; /^emerging-optimizers/d','') tests/requirements.txt >$(VENV)/requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r $(VENV)/requirements.txt megatron-core==$(MEGATRON_CORE)
	touch $@

# Transformer Engine's modules without a GPU: minutes of compiling, see tests/te/Makefile.
test-te:
	$(MAKE) -C tests/te test

# Upstream's own unit tests, on stock megatron-core and over the overlay: make test-upstream
# MEGATRON_LM=PATH_OF_A_CHECKOUT [RANKS=8] [FILES="tests/unit_tests/…"]
test-upstream: $(READY)
	$(BIN)/python -m tests.upstream.run $(if $(RANKS),--ranks $(RANKS)) $(MEGATRON_LM) $(FILES)

clean:
	rm -rf .venv* demo checkpoints build *.egg-info .pytest_cache .ruff_cache
