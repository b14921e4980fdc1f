# Everything runs in a virtual environment of its own: one for each megatron-core version, and one for
# each older torch (TORCH=2.6.0), on which only the tests of the tools run. MEGATRON_LM=PATH_OF_A_CHECKOUT
# tests over the megatron of that checkout, whatever its version.
MEGATRON_CORE ?= 0.19.2
TORCH ?=
PYTHON ?= python3.12
VENV ?= .venv$(if $(filter-out 0.19.2,$(MEGATRON_CORE)),-$(MEGATRON_CORE))$(if $(TORCH),-torch-$(TORCH))
# What uses most of torch; CI runs these on the oldest one.
TOOLS := $(filter-out %_real.py,$(wildcard $(addprefix tests/unit_tests/tools/checkpoint/, \
    test_weighted_merge*.py test_merge_*.py test_inspect_*.py common/test_*.py)))
TESTS ?= $(if $(TORCH),$(TOOLS))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test test-te test-upstream lint clean

demo: $(READY)
	$(BIN)/python -W ignore examples/demo.py demo

# What ran and how it ended is left in build/results, for docs/draw_environments.py. Only megatron is
# taken from a checkout, which has tests and tools of its own.
CHECKOUT := build/$(notdir $(abspath $(MEGATRON_LM)))
RESULTS := build/results/$(VENV)$(if $(MEGATRON_LM),-$(notdir $(CHECKOUT))).xml
test: $(READY)
ifneq ($(MEGATRON_LM),)
	mkdir -p $(CHECKOUT) && ln -sfn $(abspath $(MEGATRON_LM))/megatron $(CHECKOUT)/megatron
endif
	$(if $(MEGATRON_LM),MEGATRON_LM=$(MEGATRON_LM) PYTHONPATH=$(abspath $(CHECKOUT))) \
		$(BIN)/python -m pytest --junitxml=$(RESULTS) $(TESTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): tests/requirements.txt $(if $(TORCH),tests/torch_without_cuda.py)
	$(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),)
	$(PIP) -r tests/requirements.txt megatron-core==$(MEGATRON_CORE)
else
	grep -v -E '^(torch|emerging-optimizers|ruff|mypy)=' tests/requirements.txt >$(VENV)/requirements.txt
	$(PIP) -r $(VENV)/requirements.txt
	$(PIP) --no-deps megatron-core==$(MEGATRON_CORE)
	$(BIN)/python tests/torch_without_cuda.py $(TORCH)
endif
	touch $@

# Transformer Engine's modules without a GPU: minutes of compiling, see tests/te/Makefile.
test-te:
	$(MAKE) -C tests/te test

# Upstream's own unit tests, on stock megatron-core and over the overlay: make test-upstream
# MEGATRON_LM=PATH_OF_A_CHECKOUT [RANKS=8] [FILES="tests/unit_tests/…"]
test-upstream: $(READY)
	$(BIN)/python -m tests.upstream.run $(if $(RANKS),--ranks $(RANKS)) $(MEGATRON_LM) $(FILES)

clean:
	rm -rf .venv* demo checkpoints* build *.egg-info .pytest_cache .ruff_cache
