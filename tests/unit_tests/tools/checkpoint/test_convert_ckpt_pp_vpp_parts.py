"""The converter's parts on their own: layouts, proof by shapes, args, files."""

import argparse
import zipfile

import numpy
import pytest
import torch

from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.common.numbers import whole
from tools.checkpoint.pp_vpp import torch_file
from tools.checkpoint.pp_vpp.optimizer_state import Group, Slot, parse
from tools.checkpoint.pp_vpp.param_match import NamedTensor, candidates, match
from tools.checkpoint.pp_vpp.rank_args import ParallelSizes, rewrite, split_pattern, stage_string
from tools.checkpoint.pp_vpp.sources import look_at


def named(*shapes):
    return [NamedTensor('model', f'w{i}', torch.empty(shape)) for i, shape in enumerate(shapes)]


def groups(*members, **fields):
    return [
        (
            Group(0, number, fields, not shapes),
            [
                Slot(0, number, i, None if s is None else torch.Size(s), {'at': i})
                for i, s in enumerate(shapes)
            ],
        )
        for number, shapes in enumerate(members)
    ]


def test_match_deals_out_matrices_and_vectors():
    found = match(named((2, 3), (3,), (2, 3), (4,)), groups([(2, 3), (2, 3)], [(3,), (4,)]), 'o')
    assert [(slot.group, slot.state['at']) for slot in found] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_match_passes_over_what_is_not_trained():
    found = match(named((2, 3), (9,), (4,)), groups([(2, 3)], [(4,)]), 'o')
    assert [slot and slot.group for slot in found] == [0, None, 1]


def test_match_without_state_by_number_alone():
    found = match(named((2,), (3,)), groups([None, None]), 'o')
    assert [slot.state['at'] for slot in found] == [0, 1]


@pytest.mark.parametrize(
    'tensors, members, reason',
    [
        (named((2,), (2,)), groups([(2,)]), "can't be proven"),
        (named((2,), (2,)), groups([(2,)], [(2,)]), "can't be proven"),
        (named((2,), (3,)), groups([None], [None]), "can't be proven"),
        (named((2,), (3,)), groups([(3,), (2,)]), r'shape \(2,\), expected \(3,\)'),
        (named((2,)), groups([(2,), (2,)]), 'state of 2 parameters, but the model has 1'),
        (named(*[(1,)] * 40), groups(*[[(1,)] * 4] * 5), "can't be proven"),
    ],
)
def test_match_refuses_what_is_not_the_only_way(tensors, members, reason):
    with pytest.raises(CheckpointError, match=reason):
        match(tensors, members, 'o')


def test_match_keeps_experts_apart():
    """Equal shapes, told apart by the group's own flag."""
    tensors = [
        NamedTensor('model', name, torch.empty(2, 2))
        for name in ('mlp.fc1', 'mlp.experts.fc1', 'mlp.shared_experts.fc1')
    ]
    dense, experts = groups([(2, 2), (2, 2)]), groups([(2, 2)], is_expert_parallel=True)
    found = match(tensors, [*dense, *experts], 'o')
    assert found == [dense[0][1][0], experts[0][1][0], dense[0][1][1]]


def test_candidates_are_the_parameters():
    state = {
        'a.weight': torch.empty(2),
        'a._extra_state': torch.empty(2),
        'b._extra_state': None,
        'router.expert_bias': torch.empty(2),
        'count': torch.zeros(2, dtype=torch.int64),
    }
    assert [tensor.name for tensor in candidates('model', state)] == ['a.weight']


def test_state_of_several_shapes_is_unknown():
    state = {
        'state': {0: {'row': torch.ones(2), 'column': torch.ones(3)}},
        'param_groups': [{'params': [0]}],
    }
    with pytest.raises(CheckpointError, match='different shapes.*--drop-optimizer'):
        parse(state, 'o')


def arguments(**changes):
    values = {
        'tensor_model_parallel_size': 2,
        'pipeline_model_parallel_size': 4,
        'virtual_pipeline_model_parallel_size': None,
        'world_size': 16,
        'data_parallel_size': 2,
        'transformer_pipeline_model_parallel_size': 4,
        'context_parallel_size': 1,
        'num_layers_per_virtual_pipeline_stage': None,
        'pipeline_model_parallel_layout': None,
        'num_virtual_stages_per_pipeline_rank': None,
        'decoder_first_pipeline_num_layers': 1,
        'decoder_last_pipeline_num_layers': None,
        'account_for_loss_in_pipeline_split': True,
    }
    return argparse.Namespace(**(values | changes))


def sized(tensor, pipeline, virtual, layers, **more):
    return ParallelSizes(
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        tensor_ranks=tensor * pipeline,
        layers=layers,
        **{'complete': True, **more},
    )


def test_args_of_an_even_layout():
    old = arguments()
    new = rewrite(old, sized(2, 2, 2, [3, 3, 3, 3]))
    assert vars(new) == vars(
        arguments(
            pipeline_model_parallel_size=2,
            transformer_pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
            num_layers_per_virtual_pipeline_stage=3,
            decoder_first_pipeline_num_layers=None,
            account_for_loss_in_pipeline_split=False,
            world_size=8,
        )
    )
    assert old == arguments()


def test_args_of_an_uneven_layout():
    new = rewrite(arguments(mtp_num_layers=1), sized(2, 2, 2, [1, 2, 2, 1]))
    assert new.pipeline_model_parallel_layout == 'Et|tt|tt|tmL'
    assert new.num_layers_per_virtual_pipeline_stage is None
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    PipelineParallelLayerLayout(stage_string([1, 2, 2, 1], 1), 2).validate_layer_layout(6, 1)


def test_args_that_agree_already_keep_their_flags():
    old = arguments()
    assert rewrite(old, sized(2, 4, None, [1, 2, 2, 2])) == old


def test_args_of_the_same_sizes_with_other_layers_lose_their_flags():
    new = rewrite(arguments(), sized(2, 4, None, [2, 2, 2, 1], resplit=True))
    assert new.decoder_first_pipeline_num_layers is None
    assert new.account_for_loss_in_pipeline_split is False
    assert new.pipeline_model_parallel_layout == 'Ett|tt|tt|tL'


def test_args_of_one_side_claim_nothing_about_the_whole_model():
    new = rewrite(arguments(), sized(2, 1, 2, [1, 2], complete=False))
    assert new.pipeline_model_parallel_layout is None
    assert new.num_layers_per_virtual_pipeline_stage is None
    assert (new.pipeline_model_parallel_size, new.world_size) == (1, 4)


def test_args_without_data_parallel_size_keep_the_replication():
    old = arguments()
    del old.data_parallel_size
    assert rewrite(old, sized(2, 2, 2, [1] * 4)).world_size == 8


def test_hybrid_pattern_is_cut_anew():
    assert split_pattern('M*|M-|MM|--/M*', [3, 5]) == 'M*M|-MM--/M*'
    assert split_pattern('M*4', [3, 5]) == 'M*4'


WHOLE = {'embedding.x': 0, 'decoder.layers.0.x': 0, 'decoder.final_layernorm.x': 0}
EXPERTS = {'expert_model_parallel_size': 2}


@pytest.mark.parametrize(
    'args, last, expected',
    [
        ({'pipeline_model_parallel_size': 1, **EXPERTS}, WHOLE, (0, 0, 1)),
        ({'pipeline_model_parallel_size': 2, **EXPERTS}, WHOLE, (1, 0, None)),
        ({'pipeline_model_parallel_size': 1.0, **EXPERTS}, WHOLE, (0, 0, 1)),
        (None, WHOLE, (0, 0, 1)),
        (EXPERTS, WHOLE, (0, 0, 1)),
        (None, {'decoder.layers.0.x': 0, 'decoder.final_layernorm.x': 0}, (1, 0, None)),
        (None, {'embedding.x': 0, 'decoder.layers.0.x': 0}, (1, 0, None)),
        (None, {}, (1, 0, None)),
        (None, {'embedding.x': 0, 'mtp.x': 0, 'output_layer.x': 0}, (1, 0, None)),
    ],
)
def test_second_field_of_a_directory_name(tmp_path, args, last, expected):
    """``mp_rank_00_001`` is a pipeline rank, or without a pipeline an expert rank.

    Without sizes in ``args`` it is one where every file holds a whole model.
    """
    for name in ('mp_rank_00_000', 'mp_rank_00_001'):
        (tmp_path / 'iter_0000001' / name).mkdir(parents=True)
        (tmp_path / 'iter_0000001' / name / 'model_optim_rng.pt').touch()

    def read(path):
        model = last if path.parent.name == 'mp_rank_00_001' else WHOLE
        state = {'model': model} | ({} if args is None else {'args': argparse.Namespace(**args)})
        return torch_file.MappedFile(path, state, {})

    assert max(look_at('', tmp_path / 'iter_0000001', read).files) == expected


@pytest.mark.parametrize(
    'value, expected',
    [
        (2, 2),
        (2.0, 2),
        (numpy.int64(2), 2),
        (numpy.uint8(2), 2),
        (numpy.float32(2), 2),
        (torch.tensor(2), 2),
        (0, 0),
        (-1, -1),
        (2.5, None),
        (float('nan'), None),
        (float('inf'), None),
        (True, None),
        (numpy.bool_(True), None),
        ('2', None),
        (None, None),
        ([2], None),
        (torch.ones(2), None),
    ],
)
def test_whole_numbers(value, expected):
    found = whole(value)
    assert found == expected and type(found) is type(expected)


def test_file_is_a_sound_archive_with_the_sources_checksums(tmp_path):
    state = {'a': torch.rand(1000), 'b': [torch.rand(70000), torch.rand(0)], 'c': (1, 'x')}
    torch.save(state, tmp_path / 'old.pt')
    mapped = torch_file.read(tmp_path / 'old.pt', False)
    assert len(mapped.records) == 2
    written = []
    new = {'a': mapped.state['a'], 'fresh': torch.ones(5), 'view': mapped.state['b'][0][10:20]}
    new['none'] = mapped.state['b'][1]
    torch_file.write(tmp_path / 'new.pt', new, mapped.records, written.append)
    assert zipfile.ZipFile(tmp_path / 'new.pt').testzip() is None
    assert sum(written) == (tmp_path / 'new.pt').stat().st_size
    found = torch.load(tmp_path / 'new.pt')
    assert torch.equal(found['a'], state['a']) and torch.equal(found['fresh'], torch.ones(5))
    assert torch.equal(found['view'], state['b'][0][10:20]) and found['none'].shape == (0,)
    assert found['view'].untyped_storage().nbytes() == 40
    assert torch.serialization.get_crc32_options()


def test_damage_of_the_source_shows_in_the_new_file(tmp_path):
    torch.save({'a': torch.zeros(100000)}, tmp_path / 'old.pt')
    data = bytearray((tmp_path / 'old.pt').read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / 'old.pt').write_bytes(data)
    mapped = torch_file.read(tmp_path / 'old.pt', False)
    torch_file.write(tmp_path / 'new.pt', mapped.state, mapped.records, lambda count: None)
    assert 'data/0' in zipfile.ZipFile(tmp_path / 'new.pt').testzip()


def test_source_without_checksums_gets_some(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({'a': torch.rand(300000)}, tmp_path / 'old.pt')
    finally:
        torch.serialization.set_crc32_options(True)
    mapped = torch_file.read(tmp_path / 'old.pt', False)
    torch_file.write(tmp_path / 'new.pt', mapped.state, mapped.records, lambda count: None)
    assert zipfile.ZipFile(tmp_path / 'new.pt').testzip() is None


def test_source_that_gets_shorter_is_noticed(tmp_path):
    torch.save({'a': torch.rand(300000)}, tmp_path / 'old.pt')
    mapped = torch_file.read(tmp_path / 'old.pt', False)
    torch.save({}, tmp_path / 'other.pt')
    (tmp_path / 'other.pt').replace(tmp_path / 'old.pt')
    with pytest.raises(OSError, match='got shorter'):
        torch_file.write(tmp_path / 'new.pt', mapped.state, mapped.records, lambda count: None)
