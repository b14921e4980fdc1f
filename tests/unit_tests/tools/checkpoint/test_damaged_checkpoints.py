"""Any damage to a checkpoint's files ends in the right values or in one line, and never in part.

Fixed examples in the suite; ``RELIABILITY_EXAMPLES=5000`` makes a campaign of each, see
docs/reliability.md.
"""

import contextlib
import io
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.gpt_checkpoint_plan import main as dry_run

from tests.unit_tests.tools.checkpoint.damage import (
    damaged_bytes,
    damaged_object,
    examples,
    guarded,
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
            with contextlib.redirect_stderr(io.StringIO()):
                error = refused(lambda: merge(self.paths, [0.5, 0.5], out, **options))
            if error is not None:
                assert not (self.root / 'out').exists(), 'something was left'
                return None
            return model(out / 'iter_0000002')
        finally:
            damaged.write_bytes(self.files[name])
            shutil.rmtree(self.root / 'out', ignore_errors=True)


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp('lab'))


def data_file(lab):
    return next(name for name in sorted(lab.files) if name.endswith('.distcp'))


@examples(150)
@given(st.data())
def test_metadata_with_damaged_bytes(lab, data):
    merged = lab.merged('.metadata', data.draw(damaged_bytes(lab.files['.metadata'])))
    if merged is not None:
        assert_same(merged, lab.expected)


@examples(150)
@given(st.data())
def test_metadata_with_odd_content(lab, data):
    metadata = dcp.FileSystemReader(lab.paths[1]).read_metadata()
    merged = lab.merged('.metadata', pickle.dumps(data.draw(damaged_object(metadata))))
    if merged is not None:
        assert_same(merged, lab.expected)


@examples(100)
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
    finally:
        (lab.paths[1] / name).write_bytes(lab.files[name])
    assert_same(merged, plain_merge([lab.models[0], second], [0.5, 0.5]))


@examples(60)
@given(st.data())
def test_common_state_with_damaged_bytes(lab, data):
    merged = lab.merged('common.pt', data.draw(damaged_bytes(lab.files['common.pt'])))
    if merged is not None:
        assert_same(merged, lab.expected)


@examples(60)
@given(st.data())
def test_common_state_with_odd_content(lab, data):
    state = {'iteration': 2, 'args': None, 'lr': [1, 2.5], 'w': torch.ones(2)}
    merged = lab.merged('common.pt', saved(data.draw(damaged_object(state))))
    if merged is not None:
        assert_same(merged, lab.expected)


@examples(60)
@given(st.data())
def test_format_file_with_damaged_bytes(lab, data):
    merged = lab.merged('metadata.json', data.draw(damaged_bytes(lab.files['metadata.json'])))
    if merged is not None:
        assert_same(merged, lab.expected)


@examples(60)
@given(st.data())
def test_dry_run_of_a_load_with_odd_metadata(lab, data):
    """The look at what a load will do ends in its report, with 0 or 1."""
    metadata = dcp.FileSystemReader(lab.paths[0]).read_metadata()
    whole = pickle.dumps(data.draw(damaged_object(metadata)))
    damaged = lab.paths[1] / '.metadata'
    damaged.write_bytes(data.draw(st.one_of(st.just(whole), damaged_bytes(whole))))
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), guarded():
            assert dry_run([str(lab.paths[1]), '*-*-']) in (0, 1)
    finally:
        damaged.write_bytes(lab.files['.metadata'])
    assert output.getvalue()
