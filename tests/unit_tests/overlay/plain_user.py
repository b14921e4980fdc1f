"""A training script that knows nothing of the overlay: prints as JSON what it gets from megatron.

With ``--child`` a spawned process tells its part too.
"""

import importlib
import inspect
import json
import multiprocessing
import pickle
import sys
import traceback
from types import SimpleNamespace
from unittest import mock

NAMES = [
    'megatron.core.dist_checkpointing.gpt_checkpoint_interop',
    'megatron.core.optimizer.distrib_optimizer',
    'megatron.training.checkpointing',
]


def files():
    """Path of each module that is looked at; None where there is no such module."""
    found = {}
    for name in NAMES:
        try:
            found[name] = importlib.import_module(name).__file__
        except ModuleNotFoundError:
            found[name] = None
    return found


def facts():
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.training import checkpointing

    cls = distrib_optimizer.DistributedOptimizer
    return {
        'files': files(),
        'module': cls.__module__,
        'qualname': cls.__qualname__,
        'bases': [base.__name__ for base in cls.__mro__],
        'one class': optimizer.DistributedOptimizer is cls,
        'pickled': pickle.loads(pickle.dumps(cls)) is cls,
        'instance pickled': type(pickle.loads(pickle.dumps(instance(cls)))) is cls,
        'isinstance': isinstance(instance(cls), optimizer.MegatronOptimizer),
        'source file': inspect.getsourcefile(checkpointing.save_checkpoint),
        'source': inspect.getsource(checkpointing.save_checkpoint).splitlines()[0],
        'class source': [
            inspect.getsource(each).splitlines()[0]
            for each in (cls, distrib_optimizer.Range, checkpointing.CheckpointType)
        ],
        'mocked': mocked(checkpointing),
        'overlay is imported': 'megatron_overlay' in sys.modules,
    }


def instance(cls):
    made = cls.__new__(cls)
    made.__dict__ = {}
    return made


def mocked(checkpointing):
    """An upstream function that looks at ``get_args()`` fails over what the mock gave it."""
    args = SimpleNamespace(num_layers=71)
    with mock.patch('megatron.training.checkpointing.get_args', return_value=args):
        try:
            checkpointing.check_checkpoint_args(SimpleNamespace(num_layers=72))
        except AssertionError as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return {'file': frame.filename, 'line': frame.line, 'message': str(error)}


def reloaded():
    from megatron.training import checkpointing

    def upstream_names():
        return sorted(vars(getattr(checkpointing, 'upstream', SimpleNamespace())))

    before = upstream_names()
    again = importlib.reload(checkpointing)
    return {
        'same module': again is checkpointing,
        'upstream': upstream_names() == before,
        'code': again.load_checkpoint.__code__.co_filename,
        'files': files(),
    }


def main():
    result = facts()
    if '--child' in sys.argv:
        with multiprocessing.get_context('spawn').Pool(1) as pool:
            result['child'] = pool.apply(files)
    result['reloaded'] = reloaded()
    print('FACTS', json.dumps(result))


if __name__ == '__main__':
    main()
