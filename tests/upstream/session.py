"""One rank's pytest session over a file of upstream's unit tests; started by ``run.py``.

    python session.py MEGATRON_LM FILE DIRECTORY

Runs by its path: upstream's tests and ours are both a package ``tests``. The checkout's is
imported, and finds :mod:`tests.cpu_megatron` in ours.
"""

import contextlib
import json
import os
import sys
import types
import unittest.mock
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def main(checkout: str, file: str, directory: str) -> int:
    """Run the tests in ``file``; write node ids and outcomes into ``directory``, as they come.

    Returns:
        pytest's exit status.
    """
    sys.path[:1] = [checkout, str(REPOSITORY)]
    import tests

    tests.__path__.append(str(REPOSITORY / 'tests'))
    # upstream's conftest fetches data sets, which none of these tests reads
    downloads = 'tests.test_utils.python_scripts.download_unit_tests_dataset'
    _stand_in(downloads, download_and_extract_asset=lambda **kwargs: None)
    # imported at the top of files for a few of their tests, which are skipped without such a GPU
    _stand_in(
        'transformer_engine.pytorch.fp8',
        fp8_autocast=contextlib.nullcontext,
        check_fp8_support=lambda: (False, 'no GPU'),
    )
    sys.modules.setdefault('mock', unittest.mock)  # the package is its backport
    import pytest

    from tests.cpu_megatron import plugin, simulated_devices

    _layers_without_te()
    if 'cpu_offloading' in file:
        simulated_devices.install()
    outcomes = Path(directory, f'outcomes-{os.environ.get("RANK", "0")}')
    with outcomes.open('w', buffering=1) as lines:
        return pytest.main(
            ['-q', '-p', 'no:cacheprovider', '--rootdir', checkout, f'{checkout}/{file}'],
            plugins=[plugin, Outcomes(lines)],
        )


def _stand_in(name: str, **attributes) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(attributes)


def _layers_without_te() -> None:
    # what the tests import in the place of Transformer Engine's layers
    import megatron.core.models.gpt.gpt_layer_specs as gpt
    import megatron.core.models.hybrid.hybrid_layer_specs as hybrid

    from tests.cpu_megatron.hybrid_spec import hybrid_stack_spec

    decoder_block = gpt.get_gpt_decoder_block_spec

    def local_decoder_block(config, use_transformer_engine=False, *args, **kwargs):
        return decoder_block(config, False, *args, **kwargs)

    def local_layer(*args, use_te_op_fuser=None, use_te_activation_func=None, **kwargs):
        return gpt.get_gpt_layer_local_spec(*args, **kwargs)

    gpt.get_gpt_decoder_block_spec = local_decoder_block
    gpt.get_gpt_layer_with_transformer_engine_spec = local_layer
    hybrid.hybrid_stack_spec = hybrid_stack_spec


class Outcomes:
    """Writes each test's outcome: passed, failed or skipped; a failed set-up is a failed test."""

    def __init__(self, lines):
        self._lines = lines

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == 'call' or report.outcome != 'passed':
            self._lines.write(json.dumps([report.nodeid, report.outcome]) + '\n')


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
