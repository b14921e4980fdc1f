"""Nothing in a checkpoint runs, and what is refused is named."""

import argparse
import collections
import contextlib
import importlib
import io
import os
import pickle
import signal
import types
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from tests.cpu_megatron.whole_checkpoint import ALONE
from tools.checkpoint.common.dcp_metadata import load_dcp_metadata
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.common.safe_load import load_torch


class Hostile:
    """Its unpickling creates a file."""

    def __init__(self, proof):
        self.proof = str(proof)

    def __reduce__(self):
        return os.mkdir, (self.proof,)


@pytest.fixture
def proof(tmp_path):
    return tmp_path / 'code-has-run'


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / 'checkpoint'
    dcp.save(
        {'model.weight': torch.arange(6, dtype=torch.bfloat16), 'model.bytes': io.BytesIO(b'x')},
        checkpoint_id=directory,
        **ALONE,
    )
    return directory


def test_metadata_equals_what_dcp_reads(checkpoint):
    ours = load_dcp_metadata(checkpoint)
    theirs = pickle.loads((checkpoint / '.metadata').read_bytes())
    assert ours == theirs and isinstance(ours, Metadata)
    assert load_dcp_metadata(checkpoint, trust=True) == theirs


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_of_any_protocol(checkpoint, protocol):
    metadata = load_dcp_metadata(checkpoint)
    metadata.planner_data = {'plans': [SavePlan([])], 'set': {1, 2}, 'path': Path('a')}
    (checkpoint / '.metadata').write_bytes(pickle.dumps(metadata, protocol))
    assert load_dcp_metadata(checkpoint) == metadata


@pytest.mark.parametrize('arguments', [b'(c__builtin__\nint\nI5\n', b'(c__builtin__\nobject\nI5\n'])
def test_objects_of_protocol_0_are_made_of_nothing_else(tmp_path, arguments):
    data = b'ccopy_reg\n_reconstructor\n(ctorch\nSize\n' + arguments[1:] + b'tR.'
    (tmp_path / '.metadata').write_bytes(data)
    with pytest.raises(CheckpointError, match='refused class'):
        load_dcp_metadata(tmp_path)


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_hostile_metadata_is_refused_unless_trusted(checkpoint, proof, protocol):
    metadata = load_dcp_metadata(checkpoint)
    metadata.planner_data = Hostile(proof)
    (checkpoint / '.metadata').write_bytes(pickle.dumps(metadata, protocol))
    with pytest.raises(CheckpointError, match=r'\.metadata: refused class posix\.mkdir; .*trust'):
        load_dcp_metadata(checkpoint)
    assert not proof.exists()
    load_dcp_metadata(checkpoint, trust=True)
    assert proof.exists()


@pytest.mark.parametrize(
    'module, name',
    [
        ('builtins', 'eval'),
        ('builtins', 'getattr'),
        ('os', 'system'),
        ('torch', 'load'),
        ('torch.distributed.checkpoint.metadata', 'os'),
        ('torch.hub', 'load'),
        ('torch.distributed.checkpoint.filesystem', 'FileSystemReader'),
        ('torch.distributed.checkpoint.metadata', 'os.system'),
        ('collections', 'namedtuple'),
    ],
)
def test_other_globals_of_admitted_modules_are_refused_too(tmp_path, module, name):
    data = (
        pickle.PROTO
        + b'\x04'
        + b''.join(b'\x8c' + bytes([len(text)]) + text.encode() for text in (module, name))
        + pickle.STACK_GLOBAL
        + pickle.STOP
    )
    (tmp_path / '.metadata').write_bytes(data)
    with pytest.raises(CheckpointError, match=f'refused class {module}.{name}'):
        load_dcp_metadata(tmp_path)


def test_a_pickle_that_changes_an_admitted_class_is_refused_and_undone(tmp_path):
    # BUILD with a (None, dict) state sets attributes on whatever is on the stack, classes too
    before = Metadata.__init__
    state = pickle.dumps((None, {'__init__': print.__name__, 'extra': 1}), 2)[2:-1]
    (tmp_path / '.metadata').write_bytes(
        pickle.PROTO
        + b'\x02'
        + b'ctorch.distributed.checkpoint.metadata\nMetadata\n'
        + state
        + pickle.BUILD
        + pickle.STOP
    )
    with pytest.raises(CheckpointError, match='refused class Metadata with changed attributes'):
        load_dcp_metadata(tmp_path)
    assert Metadata.__init__ is before and not hasattr(Metadata, 'extra')


@pytest.mark.parametrize(
    'data',
    [
        b'',
        b'\x80',
        b'garbage',
        b'\0' * 64,
        pickle.dumps({'a': 1}),
        pickle.dumps(None),
        pickle.dumps(Metadata({})),
        pickle.dumps(StorageMeta()),
    ],
)
def test_what_is_no_metadata_is_said_so(tmp_path, data):
    (tmp_path / '.metadata').write_bytes(data)
    with pytest.raises(CheckpointError, match=r'\.metadata: (not|holds)') as caught:
        load_dcp_metadata(tmp_path)
    assert '\n' not in str(caught.value)


def test_metadata_truncated_anywhere(checkpoint):
    data = (checkpoint / '.metadata').read_bytes()
    for length in range(0, len(data), 7):
        (checkpoint / '.metadata').write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            load_dcp_metadata(checkpoint)


def test_metadata_missing(tmp_path):
    with pytest.raises(CheckpointError, match='no such file; the save .* was not finished'):
        load_dcp_metadata(tmp_path)


def test_what_megatron_stores_loads(tmp_path):
    state = {
        'args': argparse.Namespace(
            dtype=torch.bfloat16,
            path=Path('/x'),
            backend=AttnBackend.auto,
            size=torch.Size([2]),
            signal=signal.SIGTERM,
            model_type=ModelType.encoder_or_decoder,
            nothing=None,
        ),
        'optimizer': OptimizerConfig(lr=0.5),
        'rng': ['MT19937', numpy.arange(4, dtype=numpy.uint32), 3, numpy.float64(0.25)],
        'scalars': [numpy.float32(1.5), numpy.int64(3), numpy.bool_(True)],
        'extra': io.BytesIO(b'abc'),
        'order': collections.OrderedDict(a=1),
        'simple': types.SimpleNamespace(b=2),
    }
    torch.save(state, tmp_path / 'common.pt')
    loaded = load_torch(tmp_path / 'common.pt')
    assert loaded['args'] == state['args']
    assert loaded['optimizer'] == state['optimizer']
    assert loaded['rng'][1].tolist() == [0, 1, 2, 3] and loaded['rng'][3] == 0.25
    assert loaded['scalars'] == state['scalars']
    assert loaded['extra'].getvalue() == b'abc'
    assert load_torch(io.BytesIO((tmp_path / 'common.pt').read_bytes()), name='x')['simple'].b == 2


def test_hostile_torch_file_is_refused_unless_trusted(tmp_path, proof):
    file = tmp_path / 'common.pt'
    torch.save({'args': Hostile(proof)}, file)
    with pytest.raises(CheckpointError, match=r'common\.pt: refused class posix\.mkdir') as caught:
        load_torch(file)
    assert '\n' not in str(caught.value) and not proof.exists()
    load_torch(file, trust=True)
    assert proof.exists()


@pytest.mark.parametrize('keep', [0, 1, 10, 200, -1, -30])
def test_truncated_and_garbage_torch_files_give_one_line(tmp_path, keep):
    file = tmp_path / 'common.pt'
    torch.save({'a': torch.arange(100)}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r'common\.pt: ') as caught:
        load_torch(file)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('data', [b'garbage', b'\x80\x02N.', b'PK\x03\x04' + b'\0' * 60])
def test_garbage_torch_file(tmp_path, data):
    (tmp_path / 'x.pt').write_bytes(data)
    with pytest.raises(CheckpointError, match=r'x\.pt: no torch\.save file'):
        load_torch(tmp_path / 'x.pt')


def test_what_numpy_1_wrote_loads(tmp_path):
    buffer = io.BytesIO()
    torch.save({'rng': numpy.arange(4, dtype=numpy.uint32), 'loss': numpy.float32(2)}, buffer)
    assert b'numpy._core' in buffer.getvalue()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(tmp_path / 'old.pt', 'w') as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b'numpy._core', b'numpy.core'))
    loaded = load_torch(tmp_path / 'old.pt')
    assert loaded['loss'] == 2 and loaded['rng'].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize('value', [Hostile, Path.cwd, torch.nn.Linear(1, 1)])
def test_classes_functions_and_modules_are_refused_by_name(tmp_path, value):
    torch.save({'args': value}, tmp_path / 'common.pt')
    with pytest.raises(CheckpointError, match=r'refused class \S*(Hostile|cwd|getattr|Linear);'):
        load_torch(tmp_path / 'common.pt')


@pytest.mark.parametrize(
    'module, missing',
    [('forklib.parts', 'module forklib'), ('megatron.core.enums', 'Absent')],
)
def test_code_that_is_not_there_is_no_damage(tmp_path, module, missing):
    """Without and with trust: trusting the file wouldn't load it."""
    name = f'c{module}\nAbsent\n'.encode()
    (tmp_path / '.metadata').write_bytes(pickle.PROTO + b'\x02' + name + pickle.STOP)
    torch.save({'a': 1}, tmp_path / 'a.pt')
    with (
        zipfile.ZipFile(tmp_path / 'a.pt') as saved,
        zipfile.ZipFile(tmp_path / 'b.pt', 'w') as new,
    ):
        for record in saved.namelist():
            own = pickle.PROTO + b'\x02' + name + pickle.STOP
            new.writestr(record, own if record.endswith('.pkl') else saved.read(record))
    for load, path in ((load_dcp_metadata, tmp_path), (load_torch, tmp_path / 'b.pt')):
        with pytest.raises(CheckpointError, match=f'refused class {module}.Absent') as caught:
            load(path)
        assert ('not installed here' in str(caught.value)) == (module == 'forklib.parts')
        with pytest.raises(CheckpointError, match=r'needs what is not installed here') as caught:
            load(path, trust=True)
        assert missing in str(caught.value) and 'damaged' not in str(caught.value)


def test_names_of_any_bytes(tmp_path):
    file = tmp_path / 'a\udcff.pt'
    with file.open('wb') as stream:
        torch.save({'a': 1}, stream)
    assert load_torch(file) == {'a': 1}


def test_mapped_tensors_and_missing_files(tmp_path):
    torch.save({'a': torch.arange(100)}, tmp_path / 'a.pt')
    assert torch.equal(load_torch(tmp_path / 'a.pt', mmap=True)['a'], torch.arange(100))
    with pytest.raises(CheckpointError, match='no such file'):
        load_torch(tmp_path / 'b.pt')


def test_loading_leaves_the_globals_that_core_registered(tmp_path):
    before = set(map(str, torch.serialization.get_safe_globals()))
    torch.save({'a': 1}, tmp_path / 'a.pt')
    load_torch(tmp_path / 'a.pt')
    assert set(map(str, torch.serialization.get_safe_globals())) == before
    assert any('UInt32DType' in entry for entry in before)


def of_every_kind():
    """A state that takes every operation in which protocols differ, and values that look alike."""
    shared, numbers = [1], set(range(2500))  # more than one batch
    return {
        'bytes': [b'', b'\x00\xff\x80', bytes(range(256)) * 300, bytearray(b'abc\xff')],
        'sets': [set(), {1, 'x'}, [{1}, {(1, 2)}], ({7, 8}, (1, 2, 3, 4)), numbers, numbers],
        'names of globals': ['torch', 'Size', 'argparse', 'torch', torch.Size([2, 3]), 'Size'],
        'texts': {'x' * 70000: 'é\n', 'y' * 300: ''},
        'numbers': [2**70, -1, 255, 256, 65536, -(2**31), 1.5, 1j, None, True, False],
        'shared': (shared, shared),
        'tensors': [torch.arange(4.0), torch.ones(2, dtype=torch.bfloat16), torch.bfloat16],
        'order': collections.OrderedDict(b=1, a=2),
        'args': argparse.Namespace(a=1, kinds=set('ab'), dtype=torch.float16, torch='Size'),
        'rng': numpy.random.get_state(),
        'scalar': numpy.int64(3),
    }


def shown_whole(value):
    """A text that is equal for equal values only."""
    if isinstance(value, set):
        return 'set', sorted(map(repr, value))
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [shown_whole(item) for item in value]
    if isinstance(value, dict):
        return type(value).__name__, [(key, shown_whole(item)) for key, item in value.items()]
    if isinstance(value, argparse.Namespace):
        return 'args', shown_whole(vars(value))
    if isinstance(value, numpy.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    return type(value).__name__, repr(value)


@pytest.mark.parametrize('protocol', range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize('how', ['mapped', 'read', 'stream'])
def test_every_pickle_protocol_is_read(tmp_path, protocol, how, recwarn):
    file = tmp_path / 'x.pt'
    state = of_every_kind()
    torch.save(state, file, pickle_protocol=protocol)
    source = io.BytesIO(b'before' + file.read_bytes()) if how == 'stream' else file
    if how == 'stream':
        source.seek(len(b'before'))
    loaded = load_torch(source, mmap=how == 'mapped')
    assert shown_whole(loaded) == shown_whole(state)
    assert shown_whole(loaded) == shown_whole(torch.load(file, weights_only=False))
    assert loaded['shared'][0] is loaded['shared'][1]
    assert loaded['sets'][4] is loaded['sets'][5]
    assert not recwarn.list  # such as torch's about protocols


@pytest.mark.parametrize('protocol', range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize('place', [lambda x: x, lambda x: {'a': [x]}, lambda x: (b'', {1}, x)])
def test_every_pickle_protocol_is_restricted(tmp_path, proof, protocol, place):
    torch.save(place(Hostile(proof)), tmp_path / 'x.pt', pickle_protocol=protocol)
    with pytest.raises(CheckpointError, match=r'x\.pt: refused class posix\.mkdir'):
        load_torch(tmp_path / 'x.pt')
    assert not proof.exists()
    for value, name in ((frozenset([1]), 'frozenset'), (range(3), 'range'), (Path.cwd, 'getattr')):
        torch.save({'a': value}, tmp_path / 'x.pt', pickle_protocol=protocol)
        with pytest.raises(
            CheckpointError, match=f'refused class (builtins.|pathlib.)?({name}|Path.cwd);'
        ):
            load_torch(tmp_path / 'x.pt')


@pytest.mark.parametrize(
    'body',
    [
        b'\x93.',  # STACK_GLOBAL of nothing
        b'K\x01K\x02\x93.',
        b'\x8c\x02os\x8c\x06system\x93)R.',
        b'\x8c\x02os\x94\x8c\x06system\x9400h\x00h\x01\x93)R.',
        b'\x8c\x08a\nb\nos\n\x8c\x06system\x93.',
        b'\x90.',
        b'(K\x01\x90.',
        b']\x94(K\x01\x90.',  # into what is no set
        b'\x8f\x94h\x00(K\x01\x90.',
        b'(\x91.',
        b'\x91.',
        b'e.',
        b'h\x05.',
        b'\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.',
        b'\x92.',
        b'\x97.',
        b'\x98.',
        b'\x8c\x05ab',
        b'',
    ],
)
def test_odd_operations_of_later_protocols_end_in_one_line(tmp_path, body):
    with zipfile.ZipFile(tmp_path / 'x.pt', 'w') as archive:
        archive.writestr('x/data.pkl', b'\x80\x04' + body)
        archive.writestr('x/version', b'3')
        archive.writestr('x/byteorder', b'little')
    with pytest.raises(CheckpointError, match=r'x\.pt: ') as caught:
        load_torch(tmp_path / 'x.pt')
    assert '\n' not in str(caught.value)


def test_protocol_1_is_named(tmp_path):
    torch.save({'a': (1, 2, 3, 4)}, tmp_path / 'x.pt', pickle_protocol=1)
    with pytest.raises(CheckpointError, match=r'x\.pt: its pickle is of protocol 0 or 1'):
        load_torch(tmp_path / 'x.pt')


def test_torchscript_stays_refused_in_every_protocol(tmp_path):
    torch.jit.script(torch.nn.Linear(1, 1)).save(tmp_path / 'old.pt')
    with (
        zipfile.ZipFile(tmp_path / 'old.pt') as old,
        zipfile.ZipFile(tmp_path / 'x.pt', 'w') as new,
    ):
        for name in old.namelist():
            data = old.read(name)
            if name.endswith('data.pkl'):
                data = b'\x80\x04' + data[2:]
            new.writestr(name, data)
    with pytest.raises(CheckpointError, match=r'x\.pt: .*TorchScript'):
        load_torch(tmp_path / 'x.pt')


@pytest.mark.parametrize(
    'named', ['pathlib.PosixPath', 'pathlib.PurePath', 'torch.serialization._get_layout']
)
def test_metadata_changes_nothing_that_it_names(checkpoint, named):
    """A pickle can set attributes on classes and functions, for the rest of the process."""
    module, _, name = named.rpartition('.')
    target = getattr(importlib.import_module(module), name)
    before = dict(vars(target))
    data = (checkpoint / '.metadata').read_bytes()
    attribute = b'N}X\x06\x00\x00\x00parentNs\x86b0'
    poison = f'c{module}\n{name}\n'.encode() + attribute
    (checkpoint / '.metadata').write_bytes(data[:2] + poison + data[2:])
    with contextlib.suppress(CheckpointError):
        load_dcp_metadata(checkpoint)
        assert not isinstance(target, type)
    assert dict(vars(target)) == before


class _Forged:
    """Pickles as a call with a NumPy type whose own flags say that it holds no objects."""

    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize('protocol', [2, 4])
@pytest.mark.parametrize('kind', ['O', 'V8'])
@pytest.mark.parametrize('maker', ['scalar', '_frombuffer', 'ndarray'])
def test_bytes_are_not_taken_for_addresses(tmp_path, kind, maker, protocol):
    fields = (('a',), {'a': (numpy.dtype('O'), 0)}) if kind == 'V8' else (None, None)

    class Type(_Forged):
        def __reduce__(self):
            state = (3, '|', None, *fields, 8, 1, 0)
            return numpy.dtype, (kind, False, True), state

    dtype, eight = Type(None), b'AAAAAAAA'
    multiarray = importlib.import_module('numpy._core.multiarray')
    if maker == 'scalar':
        value = _Forged((multiarray.scalar, (dtype, eight)))
    elif maker == '_frombuffer':
        numeric = importlib.import_module('numpy._core.numeric')
        value = _Forged((numeric._frombuffer, (eight, dtype, (1,), 'C')))
    else:
        state = (1, (1,), dtype, False, eight)
        value = _Forged((multiarray._reconstruct, (numpy.ndarray, (0,), b'b'), state))
    torch.save(
        {'args': argparse.Namespace(hidden=[value])}, tmp_path / 'x', pickle_protocol=protocol
    )
    with pytest.raises(CheckpointError):
        load_torch(tmp_path / 'x')
