# Everything runs in a virtual environment of its own: one for each megatron-core version.
MEGATRON_CORE ?= 0.19.2
PYTHON ?= python3.12
VENV ?= .venv$(if $(filter-out 0.19.2,$(MEGATRON_CORE)),-$(MEGATRON_CORE))
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-te test-upstream lint clean

demo: $(READY)
	$(BIN)/python -W ignore examples/demo.py demo

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): tests/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r tests/requirements.txt megatron-core==$(MEGATRON_CORE)
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
