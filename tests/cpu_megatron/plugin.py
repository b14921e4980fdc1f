"""Pytest plugin: megatron on the CPU, with the overlay unless ``MEGATRON_OVERLAY=0``.

Tests marked ``gpu`` start processes on a GPU; they are skipped where there is none.
"""

import gc
import importlib.metadata
import logging
import platform

import pytest

import tests.cpu_megatron as cpu_megatron
from megatron_overlay._finder import core_version
from tests.cpu_megatron import facade

SKIPPED = {'gpu': 'needs a CUDA device', 'loads': 'megatron-core loads with torch 2.7 or newer'}

cpu_megatron.install()
cpu_megatron.activate_overlay()

# With a handler there already, megatron.training's basicConfig makes none: its would go on writing
# to the stderr of the test that happened to import it.
logging.getLogger().addHandler(logging.NullHandler())


@pytest.fixture(scope='session', autouse=True)
def environment(record_testsuite_property):
    """Versions of what the tests ran with, for ``--junitxml``."""
    record_testsuite_property('python', platform.python_version())
    record_testsuite_property('torch', importlib.metadata.version('torch'))
    record_testsuite_property('megatron-core', core_version()[0])


def pytest_collection_finish():
    # megatron collects garbage with every checkpoint; what has been imported by now is none
    gc.freeze()


def pytest_collection_modifyitems(items):
    from tests.cpu_megatron.whole_checkpoint import ALONE

    here = {'gpu': facade.cuda_is_real(), 'loads': bool(ALONE)}
    for item in items:
        for marker, reason in SKIPPED.items():
            if item.get_closest_marker(marker) and not here[marker]:
                item.add_marker(pytest.mark.skip(reason=reason))
