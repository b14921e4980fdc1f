"""What is odd and yet right in a checkpoint isn't refused, and comes out as it was."""

import argparse
import shutil

import numpy
import pytest
import torch

from tests.unit_tests.tools.checkpoint.pp_vpp_damage import edit, pop, put
from tests.unit_tests.tools.checkpoint.pp_vpp_files import load, path_of, same, save
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.convert_ckpt_pp_vpp import main
from tools.checkpoint.pp_vpp.rank_args import ParallelSizes, rewrite
from tools.checkpoint.pp_vpp.rank_order import refuse_misplaced_files

KNOWN = {'checkpoint_version': 3.0, 'iteration': 2}
STAGES = [f'00_00{i}' for i in range(4)]


def filled(value, *endings):
    def change(state):
        for key, tensor in state['model'].items():
            if isinstance(tensor, torch.Tensor) and key.endswith(endings or ('',)):
                state['model'][key] = torch.full_like(tensor, value)

    return edit(change, *STAGES)


def extra_states(root):
    """As Transformer Engine's: nothing, no bytes, or a pickle whose length is the stage's own."""
    for number, rank in enumerate(STAGES):
        state = load(root, rank)
        for key in ('linear_qkv', 'linear_fc1'):
            length = 0 if key == 'linear_qkv' else 5 * number
            state['model'][f'decoder.layers.0.{key}._extra_state'] = torch.arange(
                length, dtype=torch.uint8
            )
        state['model']['decoder.layers.0.linear_fc2._extra_state'] = None
        save(state, root, rank)


def own_paths(root):
    for number, rank in enumerate(STAGES):
        for name in ('save', 'load', 'data_cache_path', 'local_rank'):
            edit(put(f'/node{number}', 'args', name), rank)(root)


def pickled(protocol):
    """As other tools save, which name a protocol."""

    def mutate(root):
        for rank in STAGES:
            torch.save(load(root, rank), path_of(root, rank), pickle_protocol=protocol)

    return mutate


def other_numbers(root):
    """As some tools store them."""
    sizes = {
        'num_layers': numpy.int64(6),
        'pipeline_model_parallel_size': 4.0,
        'tensor_model_parallel_size': numpy.int32(1),
        'world_size': numpy.int64(4),
    }
    for name, value in sizes.items():
        edit(put(value, 'args', name), *STAGES[1:])(root)
    edit(put(2.0, 'iteration'), *STAGES)(root)
    for number, rank in enumerate(STAGES):
        edit(put(numpy.int64(number), 'args', 'rank'), rank)(root)


CASES = {
    'numbers of other kinds': other_numbers,
    'no version in one file': edit(pop('checkpoint_version'), STAGES[3]),
    'no iteration in one file': edit(pop('iteration'), STAGES[1]),
    'neither in any file': edit(lambda s: [s.pop(k) for k in KNOWN] and None, *STAGES),
    'pickle protocol 3': pickled(3),
    'pickle protocol 4': pickled(4),
    'pickle protocol 5': pickled(5),
    'extra states of other lengths, or none': extra_states,
    "no two ranks alike in what is the node's": own_paths,
    'saved by a tool, one args.rank in all files': edit(put(0, 'args', 'rank'), *STAGES),
    'args.rank of no use': edit(put([1], 'args', 'rank'), *STAGES),
    'sides that were launched with seeds of their own': edit(put(7, 'args', 'seed'), *STAGES[1:3]),
    'NaN in what chunks of a rank share': edit(put(torch.full((1,), torch.nan), 'custom'), *STAGES),
    'fresh norms': filled(1.0, 'norm.weight'),
    'all layers equal': filled(0.5),
    'equal layers, saved by a tool': lambda root: [
        edit(put(argparse.Namespace(rank=0, num_layers=6), 'args'), *STAGES)(root),
        filled(0.0)(root),
    ],
}


@pytest.mark.parametrize('name', CASES)
def test_accepted(name, pp4, tmp_path):
    source = shutil.copytree(pp4, tmp_path / 'source')
    CASES[name](source)
    merge = f'merge --load-dir {source} --save-dir {tmp_path}/merged --pipeline-size 2'
    split = f'split --load-dir {tmp_path}/merged --save-dir {tmp_path}/split'
    assert main(merge.split()) == main(split.split()) == 0
    for rank in STAGES:
        before, after = load(source, rank), load(tmp_path / 'split', rank)
        assert same(before['model'], after['model']) == []
        assert same(before['optimizer'], after['optimizer']) == []
        assert {key: after[key] for key in KNOWN} == KNOWN  # as Megatron reads them
        assert type(after['iteration']) is int
        assert after['args'].pipeline_model_parallel_size == 4


def run_args(rank, world, stages=2, tensor=2, **more):
    return argparse.Namespace(
        rank=rank,
        world_size=world,
        pipeline_model_parallel_size=stages,
        tensor_model_parallel_size=tensor,
        **more,
    )


def test_what_files_lack_is_told(pp4, tmp_path, capsys):
    source = shutil.copytree(pp4, tmp_path / 'source')
    edit(pop('checkpoint_version'), *STAGES)(source)
    merge = f'merge --load-dir {source} --save-dir {tmp_path}/merged --pipeline-size 2 --dry-run'
    assert main(merge.split()) == 0
    note = 'note: 4 files have no `checkpoint_version`; the outputs get what Megatron expects there'
    assert capsys.readouterr().err.splitlines() == [note]


PATHS = {
    'iteration of its own': 'SRC/iter_0000002',
    'ends with a slash': 'SRC/iter_0000002/',
    'link to the iteration': 'LINK',
}


@pytest.mark.parametrize('name', PATHS)
def test_path_of_an_iteration(name, pp4, tmp_path):
    shutil.copytree(pp4, tmp_path / 'SRC')
    (tmp_path / 'SRC' / 'latest_checkpointed_iteration.txt').unlink()
    (tmp_path / 'LINK').symlink_to('SRC/iter_0000002')
    merge = f'merge --load-dir {tmp_path}/{PATHS[name]} --save-dir {tmp_path}/o --pipeline-size 2'
    assert main(merge.split()) == 0
    assert (tmp_path / 'o' / 'latest_checkpointed_iteration.txt').read_text() == '2\n'
    assert same(load(tmp_path / 'o', '00_000')['model1'], load(pp4, '00_002')['model']) == []


def test_empty_options_are_absent(pp4, tmp_path):
    merge = ['merge', '--load-dir', str(pp4), '--load-dir-edge', '', '--load-dir-cloud=']
    merge += ['--merge-stages', '0, 3', '--merge-cloud-stages', '', '--middle-stages', '1,2']
    merge += ['--iteration', '', '--workers= ', '--pipeline-size', '', '--save-dir', '']
    edge, cloud = str(tmp_path / 'edge'), str(tmp_path / 'cloud')
    assert main([*merge, '--save-dir-edge', edge, '--save-dir-cloud', cloud]) == 0
    split = ['split', '--load-dir-edge', edge, '--load-dir-cloud', cloud, '--load-dir', '']
    split += ['--split-rank', '', '--split-cloud-rank', '', '--num-cloud-vpp-chunks', '']
    assert main([*split, '--middle-ranks', '1,2', '--save-dir', str(tmp_path / 'out')]) == 0
    assert same(load(tmp_path / 'out', '00_003')['model'], load(pp4, '00_003')['model']) == []


EXPERTS = {'expert_model_parallel_size': 2, 'expert_tensor_parallel_size': 1}
# args.rank by (pipeline, tensor, expert rank), the rest of args, whether it is refused
ORDERS = {
    'stages one after the other': ({(0, 0): 0, (0, 1): 1, (1, 0): 4, (1, 1): 5}, {}, False),
    'exchanged': ({(0, 0): 4, (0, 1): 1, (1, 0): 0, (1, 1): 5}, {}, True),
    'whole pipelines': (
        {(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3},
        {'use_tp_pp_dp_mapping': True, 'data_parallel_size': 2},
        False,
    ),
    'whole pipelines, exchanged': (
        {(0, 0): 2, (0, 1): 3, (1, 0): 0, (1, 1): 1},
        {'use_tp_pp_dp_mapping': True, 'data_parallel_size': 2},
        True,
    ),
    'an order of another framework': ({(0, 0): 0, (0, 1): 4, (1, 0): 1, (1, 1): 5}, {}, False),
    'experts': ({(0, 0, 0): 0, (0, 1, 1): 1, (1, 0, 0): 4, (1, 1, 1): 5}, EXPERTS, False),
    'some without': ({(0, 0): None, (0, 1): 1, (1, 0): 0, (1, 1): 5}, {}, False),
    'contradictory': ({(0, 0): 90, (0, 1): 1, (1, 0): 0, (1, 1): 5}, {}, False),
}


@pytest.mark.parametrize('name', ORDERS)
def test_only_files_that_are_each_others_are_refused(name, tmp_path):
    ranks, more, refused = ORDERS[name]
    files = {}
    for place, rank in ranks.items():
        path = tmp_path / '_'.join(map(str, place)) / 'file.pt'
        path.parent.mkdir()
        torch.save(place, path)
        pipeline, tensor, expert = (*place, 0)[:3]
        files[pipeline, tensor, expert] = path, run_args(rank, 8, **more)
    if refused:
        with pytest.raises(CheckpointError, match=r'0_0/file\.pt: args\.rank is \d, expected 0'):
            refuse_misplaced_files(files)
    else:
        refuse_misplaced_files(files)


@pytest.mark.parametrize(
    'args, expected',
    [
        (run_args(5, 8), 13),  # stage 1 of 2, with two replicas of two tensor ranks
        (run_args(3, 8, use_tp_pp_dp_mapping=True, data_parallel_size=2), 7),
        (run_args(0, 4), 6),
        (run_args(9, 4), 9),
        (run_args(None, 4), None),
    ],
)
def test_rank_is_that_of_the_new_layout(args, expected):
    """Of a file that becomes the last of four stages."""
    sizes = ParallelSizes(
        tensor=2,
        pipeline=4,
        virtual=None,
        tensor_ranks=8,
        tensor_ranks_before=6,
        layers=[1] * 4,
        complete=True,
    )
    assert rewrite(args, sizes).rank == expected
