"""Pytest plugin: megatron on the CPU, with the overlay unless ``MEGATRON_OVERLAY=0``.

Tests marked ``gpu`` start processes on a GPU; they are skipped where there is none.
"""

import gc
import logging

import pytest

import tests.cpu_megatron as cpu_megatron
from tests.cpu_megatron import facade

cpu_megatron.install()
cpu_megatron.activate_overlay()

# With a handler there already, megatron.training's basicConfig makes none: its would go on writing
# to the stderr of the test that happened to import it.
logging.getLogger().addHandler(logging.NullHandler())


def pytest_collection_finish():
    # megatron collects garbage with every checkpoint; what has been imported by now is none
    gc.freeze()


def pytest_collection_modifyitems(items):
    if facade.cuda_is_real():
        return
    for item in items:
        if item.get_closest_marker('gpu'):
            item.add_marker(pytest.mark.skip(reason='needs a CUDA device'))
