"""Any damage to a checkpoint's files ends in the right values or in one line, and never in part.

Fixed examples in the suite; ``RELIABILITY_EXAMPLES=5000`` makes a campaign of each, see
docs/reliability.md.
"""

import contextlib
import hashlib
import io
import pickle
import pickletools
import shutil
import time
from argparse import Namespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tests.unit_tests.tools.checkpoint import damage
from tests.unit_tests.tools.checkpoint.damage import (
    damaged_bytes,
    damaged_json,
    damaged_object,
    damaged_pickle,
    examples,
    guarded,
    looped_file,
    refused,
    saved,
)
from tests.unit_tests.tools.checkpoint.handmade import (
    assert_same,
    load_tensors,
    plain_merge,
    set_common_form,
    write_checkpoint,
)
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.inspection.gpt_into_hybrid import dry_run as report
from tools.checkpoint.merge import payload
from tools.checkpoint.merge.geometry import Box
from tools.checkpoint.merge.payload import load_chunk, locate
from tools.checkpoint.merge.source import Slice, StoredChunk
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

TENSORS = {
    'embedding.word_embeddings.weight': torch.arange(60.0).reshape(12, 5),
    'decoder.layers.mlp.linear_fc1.weight': torch.arange(48.0).reshape(2, 6, 4).bfloat16(),
    'decoder.final_layernorm.weight': torch.ones(5),
}
LAYOUT = {'decoder.layers.mlp.linear_fc1.weight': (0, 2)}
EXTRA = {'decoder.layers._extra_state': b'state'}


def model(directory):
    return {key: value for key, value in load_tensors(directory).items() if key in TENSORS}


def test_a_hang_is_told_by_processor_time_not_by_waiting(monkeypatch):
    monkeypatch.setattr(damage, 'SECONDS', 0.2)
    with guarded():
        time.sleep(0.5)
    with pytest.raises(damage.Hang), guarded():
        while True:
            pass


def test_a_payload_changes_nothing_for_the_next_one():
    """A pickle can set attributes on what it names."""
    attribute = b'N}X\x09\x00\x00\x00row_majorI01\ns\x86b0'
    poison = b'\x80\x02ctorch._utils\n_rebuild_tensor_v2\n' + attribute + b'N.'
    before = dict(vars(payload._StoredTensor))
    with contextlib.suppress(Exception):
        payload._TensorUnpickler(io.BytesIO(poison)).load()
    assert dict(vars(payload._StoredTensor)) == before


class Lab:
    """Two small checkpoints; the second one's files get damaged, and are put right again."""

    def __init__(self, root):
        self.root = root
        second = {key: value + 1 for key, value in TENSORS.items()}
        self.models = [TENSORS, second]
        self.paths = [
            write_checkpoint(root / f'iter_{i:07d}', model, layout=LAYOUT, extra_states=EXTRA)
            for i, model in enumerate(self.models, 1)
        ]
        for i, path in enumerate(self.paths, 1):
            set_common_form(path, {'iteration': i, 'lr': [1, 2.5], 'w': torch.ones(2)}, 'legacy')
        self.files = {p.name: p.read_bytes() for p in self.paths[1].iterdir()}
        self.expected = plain_merge(self.models, [0.5, 0.5])

    def merged(self, name, data, **options):
        """Merge with ``data`` in place of a file; the tensors, or None where it is refused."""
        damaged, out = self.paths[1] / name, self.root / 'out' / 'merged'
        damaged.write_bytes(data)
        try:
            options = {'output_iteration': 2, 'threads': 1, **options}
            with contextlib.redirect_stderr(io.StringIO()) as said:
                error = refused(lambda: merge(self.paths, [0.5, 0.5], out, **options))
            assert 'Traceback' not in said.getvalue()
            if error is not None:
                assert not (self.root / 'out').exists(), 'something was left'
                return None
            return model(out / 'iter_0000002')
        finally:
            if name in self.files:
                damaged.write_bytes(self.files[name])
            else:
                damaged.unlink()
            shutil.rmtree(self.root / 'out', ignore_errors=True)


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp('lab'))


def data_file(lab):
    return next(name for name in sorted(lab.files) if name.endswith('.distcp'))


@examples(60)
@given(st.data())
def test_metadata_with_damaged_bytes(lab, data):
    merged = lab.merged('.metadata', data.draw(damaged_bytes(lab.files['.metadata'])))
    if merged is not None:
        assert_same(merged, lab.expected)


@examples(60)
@given(st.data())
def test_metadata_with_odd_content(lab, data):
    metadata = dcp.FileSystemReader(lab.paths[1]).read_metadata()
    merged = lab.merged('.metadata', data.draw(damaged_pickle(metadata)))
    if merged is not None:
        assert_same(merged, lab.expected)


@examples(50)
@given(st.data())
def test_tensor_file_with_damaged_bytes(lab, data):
    """What lies in the damaged archives is merged as torch reads it, or refused."""
    name = data_file(lab)
    damaged = data.draw(damaged_bytes(lab.files[name]))
    merged = lab.merged(name, damaged)
    if merged is None:
        return
    (lab.paths[1] / name).write_bytes(damaged)
    try:
        second = model(lab.paths[1])
    # torch also refuses damage that has nothing to do with the elements
    except (Exception, CheckpointException):  # DCP's is no Exception
        return
    finally:
        (lab.paths[1] / name).write_bytes(lab.files[name])
    assert_same(merged, plain_merge([lab.models[0], second], [0.5, 0.5]))


@examples(30)
@given(st.data())
def test_common_state_with_damaged_bytes(lab, data):
    merged = lab.merged('common.pt', data.draw(damaged_bytes(lab.files['common.pt'])))
    if merged is not None:
        assert_same(merged, lab.expected)


@examples(30)
@given(st.data())
def test_common_state_with_odd_content(lab, data):
    state = {'iteration': 2, 'args': None, 'lr': [1, 2.5], 'w': torch.ones(2)}
    merged = lab.merged('common.pt', saved(data.draw(damaged_object(state))))
    if merged is not None:
        assert_same(merged, lab.expected)


@examples(10)
@given(st.data())
def test_common_state_that_contains_itself(lab, data):
    state = {'iteration': 2, 'args': Namespace(iteration=2), 'lr': [1, {'w': 2.5}], 'd': {'e': {}}}
    merged = lab.merged('common.pt', data.draw(looped_file(state)))
    if merged is not None:
        assert_same(merged, lab.expected)


@examples(30)
@given(st.data())
def test_format_file_with_damaged_bytes(lab, data):
    merged = lab.merged('metadata.json', data.draw(damaged_bytes(lab.files['metadata.json'])))
    if merged is not None:
        assert_same(merged, lab.expected)


@examples(40)
@given(st.data())
def test_odd_manifest(lab, data):
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in lab.files.items()}
    content = data.draw(damaged_json({'algorithm': 'sha256', 'files': digests}))
    merged = lab.merged('integrity.json', content, verify=True)
    if merged is not None:
        assert_same(merged, lab.expected)


@examples(30)
@given(st.data())
def test_dry_run_of_a_load_with_odd_metadata(lab, data):
    """The look at what a load will do ends in its report, with 0 or 1."""
    metadata = dcp.FileSystemReader(lab.paths[0]).read_metadata()
    whole = data.draw(damaged_pickle(metadata))
    damaged = lab.paths[1] / '.metadata'
    damaged.write_bytes(data.draw(st.one_of(st.just(whole), damaged_bytes(whole))))
    tracker = lab.paths[1].parent / 'latest_checkpointed_iteration.txt'
    tracker.write_text(lab.paths[1].name.removeprefix('iter_'))
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), guarded():
            assert report(str(lab.paths[1].parent), '*-*-') in (0, 1)
    finally:
        tracker.unlink()
        damaged.write_bytes(lab.files['.metadata'])
    assert output.getvalue()


# --- what the campaigns found, each once


def test_one_bit_that_asks_for_memory(lab):
    """``BINPUT`` and ``LONG_BINPUT`` differ in a bit; the next four bytes become a memo index."""
    metadata = dcp.FileSystemReader(lab.paths[1]).read_metadata()
    data = pickle.dumps(metadata, protocol=2)
    at = next(at for op, _, at in pickletools.genops(data) if op.name == 'BINPUT')
    asked = data[:at] + b'r' + b'\xff\xff\xff\x7f' + data[at + 5 :]
    assert lab.merged('.metadata', asked) is None


def test_one_bit_in_a_chunk_that_asks_for_memory(lab):
    name = data_file(lab)
    data = lab.files[name]
    at = data.index(b'_rebuild_tensor_v2\nq') + len(b'_rebuild_tensor_v2\n')
    merged = lab.merged(name, data[:at] + b'r' + b'\xff\xff\xff\x7f' + data[at + 5 :])
    assert merged is None


def test_a_shifted_chunk_is_refused(lab):
    """The length of the extra fields of a local header, eight less: all values would move."""
    name = data_file(lab)
    data = bytearray(lab.files[name])
    at = data.index(b'archive/data/0FB') - 2
    data[at] -= 8
    assert lab.merged(name, bytes(data)) is None


def test_a_shape_larger_than_its_bytes_takes_no_memory(lab):
    metadata = dcp.FileSystemReader(lab.paths[1]).read_metadata()
    entry = metadata.state_dict_metadata['decoder.final_layernorm.weight']
    entry.size = torch.Size([2**36])
    entry.chunks[0] = ChunkStorageMetadata(torch.Size([0]), torch.Size([2**36]))
    assert lab.merged('.metadata', pickle.dumps(metadata)) is None


def test_a_negated_tensor_keeps_its_sign(tmp_path):
    tensor = torch._neg_view(torch.ones(5))
    path = tmp_path / 'chunk'
    path.write_bytes(saved(tensor))
    piece = Slice('chunk', 0, path.stat().st_size)
    stored = StoredChunk(path, piece, Box((0,), (5,)), torch.float32)
    with open(path, 'rb') as file:
        assert locate(file.fileno(), stored, 'key') is None
    assert torch.equal(load_chunk(stored, 'key'), -torch.ones(5))


@pytest.mark.parametrize('content', [b'[' * 200_000, b'{"sharded_backend": ' + b'7' * 5000 + b'}'])
def test_json_that_python_gives_up_on(lab, content):
    assert lab.merged('metadata.json', content) is None


@pytest.mark.parametrize(
    'content',
    [
        b'[' * 200_000,
        b'{"files": [["a", "b"]]}',
        b'{"files": {"a\\u0000b": ""}}',
        b'{"files": {"..": ""}}',
    ],
)
def test_manifests_that_name_no_file(lab, content):
    assert lab.merged('integrity.json', content, verify=True) is None


def test_a_message_stays_on_its_line():
    assert str(CheckpointError('key a\nb\x1b[31m: ü')) == r'key a\nb\x1b[31m: ü'
