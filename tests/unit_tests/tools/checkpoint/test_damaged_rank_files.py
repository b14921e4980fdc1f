"""Any damage to a legacy checkpoint's files ends in what the file holds, or in one line.

Fixed examples in the suite; ``RELIABILITY_EXAMPLES=5000`` makes a campaign of each, see
docs/reliability.md.
"""

import io
import shutil
from argparse import Namespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit_tests.tools.checkpoint.damage import (
    damaged_bytes,
    damaged_object,
    examples,
    looped_file,
    refused,
    saved,
)
from tests.unit_tests.tools.checkpoint.pp_vpp_files import ITERATION, same
from tools.checkpoint.pp_vpp.commands import merge_plain, split_plain
from tools.checkpoint.pp_vpp.convert import Options, execute, prepare

FILE = 'model_optim_rng.pt'
OPTIONS = Options(workers=1)
SIZES = ('tensor_model_parallel_size', 'pipeline_model_parallel_size')


class Lab:
    """PP 2 x VPP 2; the second rank's file gets damaged, and is put right again."""

    def __init__(self, source, root):
        self.source, self.stages, self.back = root / 'source', root / 'stages', root / 'back'
        shutil.copytree(source, self.source)
        self.file = self.source / ITERATION / 'mp_rank_00_001' / FILE
        self.content = self.file.read_bytes()
        self.state = torch.load(io.BytesIO(self.content), weights_only=False)

    def split(self, data):
        """Split with ``data`` in place of a file, and merge again; whether it was refused."""
        self.file.write_bytes(data)
        try:
            if refused(lambda: convert(split_plain(self.source, self.stages))) is not None:
                assert not self.stages.exists(), 'something was left'
                return True
            # what became another rank's than its neighbour's can be taken apart, but not joined
            self.joined = refused(lambda: convert(merge_plain(2, self.stages, self.back))) is None
            self.check(data)
            return False
        finally:
            self.file.write_bytes(self.content)
            for output in (self.stages, self.back):
                shutil.rmtree(output, ignore_errors=True)

    def check(self, data):
        """Each stage is the chunk that torch reads in the damaged file; so is the way back."""
        damaged = torch.load(io.BytesIO(data), weights_only=False)
        for chunk, stage in ((0, 1), (1, 3)):
            found = torch.load(self.stages / ITERATION / f'mp_rank_00_{stage:03d}' / FILE)
            assert same(dict(found['model']), dict(damaged[f'model{chunk}'])) == []
        if not self.joined:
            return
        back = torch.load(self.back / ITERATION / 'mp_rank_00_001' / FILE)
        back.pop('pipeline_stage_states')
        if damaged.get('optimizer', 0) is None:  # as good as none
            del damaged['optimizer']
        damaged |= {'iteration': 2, 'checkpoint_version': damaged.get('checkpoint_version', 3.0)}
        args = damaged.get('args')
        for name in SIZES if args is not None else ():  # all args get them
            if getattr(args, name, None) is None:
                setattr(args, name, getattr(self.state['args'], name))
        assert same(back, damaged) == []


def convert(request):
    execute(prepare(request, OPTIONS), OPTIONS)


@pytest.fixture(scope='module')
def lab(vpp, tmp_path_factory):
    made = Lab(vpp, tmp_path_factory.mktemp('lab'))
    assert not made.split(made.content) and made.joined
    return made


@examples(30)
@given(st.data())
def test_rank_file_with_damaged_bytes(lab, data):
    lab.split(data.draw(damaged_bytes(lab.content)))


@examples(30)
@given(st.data())
def test_rank_file_with_odd_content(lab, data):
    lab.split(saved(data.draw(damaged_object(lab.state))))


@examples(20)
@given(st.data())
def test_rank_file_with_damaged_zip_headers(lab, data):
    """The last bytes are the archive's directory."""
    tail = data.draw(damaged_bytes(lab.content[-4000:]))
    lab.split(lab.content[:-4000] + tail)


@examples(10)
@given(st.data())
def test_rank_file_that_contains_itself(lab, data):
    lab.split(data.draw(looped_file(lab.state)))


@pytest.fixture(scope='module')
def bf16(pp4, tmp_path_factory):
    root = tmp_path_factory.mktemp('bf16')
    shutil.copytree(pp4, root / 'source')
    return root


@examples(20)
@given(st.data())
def test_stage_with_odd_optimizer(bf16, data):
    """Of bf16 with fp32 masters: merged and split again it is what it was, or it is refused."""
    source, merged, back = (bf16 / name for name in ('source', 'merged', 'back'))
    file = source / ITERATION / 'mp_rank_00_001' / FILE
    content = file.read_bytes()
    state = torch.load(io.BytesIO(content), weights_only=False)
    changed = saved({**state, 'optimizer': data.draw(damaged_object(state['optimizer']))})
    file.write_bytes(changed)
    try:
        if refused(lambda: convert(merge_plain(2, source, merged))) is not None:
            assert not merged.exists(), 'something was left'
            return
        assert refused(lambda: convert(split_plain(merged, back))) is None
        found = torch.load(back / ITERATION / 'mp_rank_00_001' / FILE, weights_only=False)
        expected = torch.load(io.BytesIO(changed), weights_only=False)
        for key in ('model', 'optimizer'):
            assert same(found.get(key), expected[key]) == []
    finally:
        file.write_bytes(content)
        for output in (merged, back):
            shutil.rmtree(output, ignore_errors=True)


# --- what the campaigns found, each once


def changed(state, **values):
    return {**state, **values}


def with_args(state, **values):
    return changed(state, args=Namespace(**{**vars(state['args']), **values}))


def test_sizes_that_contradict_each_other_in_the_zip_directory(lab):
    """Mapped, the bytes are found; torch's own load of the same file fails."""
    data = bytearray(lab.content)
    name = data.rindex(b'model_optim_rng/data/3')
    data[name - 26 : name - 22] = b'\xff' * 4  # stored bytes; the next four are the content's
    assert lab.split(bytes(data))


@pytest.mark.parametrize('name', SIZES)
def test_sizes_that_args_lack_are_written(lab, name):
    for value in (None, 'gone'):
        args = Namespace(**{**vars(lab.state['args']), name: value})
        if value:
            delattr(args, name)
        assert not lab.split(saved(changed(lab.state, args=args))) and lab.joined


@pytest.mark.parametrize(
    'change',
    [
        lambda state: changed(
            state, model0={**state['model0'], 'decoder.layers.9999999999.x': torch.ones(1)}
        ),
        lambda state: changed(state, model0={**state['model0'], 3: torch.ones(1)}),
        lambda state: changed(state, model99999999={}),
        lambda state: changed(state, model01=state['model1']),
        lambda state: changed(state, iteration=torch.ones(3)),
        lambda state: changed(state, pipeline_stage_states=[1, 2]),
        lambda state: changed(state, optimizer={'state': {}, 'param_groups': 3}),
        lambda state: changed(state, optimizer={'state': 3, 'param_groups': []}),
        lambda state: with_args(state, virtual_pipeline_model_parallel_size='2'),
        lambda state: with_args(state, world_size='8', data_parallel_size=[]),
    ],
)
def test_odd_rank_files_are_refused(lab, change):
    assert lab.split(saved(change(lab.state)))


def test_sizes_of_the_first_rank_make_no_lists(lab):
    first = lab.source / ITERATION / 'mp_rank_00_000' / FILE
    content = first.read_bytes()
    state = torch.load(first, weights_only=False)
    for name in ('pipeline', 'tensor', 'expert'):
        first.write_bytes(saved(with_args(state, **{f'{name}_model_parallel_size': 2**40})))
        try:
            assert lab.split(lab.content)
        finally:
            first.write_bytes(content)


def test_a_shifted_tensor_is_refused(lab):
    data = bytearray(lab.content)
    at = data.index(b'/data/0FB') + len(b'/data/0')
    data[at - len('model_optim_rng/data/0') - 2] -= 8
    assert lab.split(bytes(data))
