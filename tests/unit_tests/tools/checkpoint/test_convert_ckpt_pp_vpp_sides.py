"""Contents of converted files, computed here independently of the converter."""

import shutil

import pytest
import torch

from tests.unit_tests.tools.checkpoint.pp_vpp_files import (
    ITERATION,
    joined_optimizer,
    load,
    same,
    save,
    tree,
)
from tools.checkpoint.convert_ckpt_pp_vpp import main

TRACKER = 'latest_checkpointed_iteration.txt'


def convert(*arguments):
    assert main([str(argument) for argument in arguments]) == 0


def merge_sides(edge, cloud, out, *mode, extra=()):
    convert(
        'merge',
        '--load-dir-edge',
        edge,
        '--load-dir-cloud',
        cloud,
        '--save-dir-edge',
        out / 'edge',
        '--save-dir-cloud',
        out / 'cloud',
        '--merge-stages',
        '0,3',
        *mode,
        *extra,
    )
    return out / 'edge', out / 'cloud'


def check_merged(found, stages, pipeline, virtual, tp):
    for i, stage in enumerate(stages):
        assert same(found[f'model{i}'], stage['model']) == []
        assert list(found[f'model{i}']) == list(stage['model'])
    assert same(found['optimizer'], joined_optimizer(stages)) == []
    for key in (
        'checkpoint_version',
        'iteration',
        'opt_param_scheduler',
        'rng_state',
        'num_floating_point_operations_so_far',
    ):
        assert same(found[key], stages[0][key]) == [], key
    args = found['args']
    assert args.pipeline_model_parallel_size == pipeline
    assert args.transformer_pipeline_model_parallel_size == pipeline
    assert args.virtual_pipeline_model_parallel_size == virtual
    assert args.tensor_model_parallel_size == tp
    assert args.world_size == tp * pipeline
    assert args.decoder_first_pipeline_num_layers is None
    assert stages[0]['args'].pipeline_model_parallel_size == 4  # the source's is another object


def stage_files(root, tp, stages):
    return [load(root, f'{tp:02d}_{stage:03d}') for stage in stages]


@pytest.mark.parametrize('source', ['pp4', 'pp4_tp2'])
def test_merge_to_cloud_chunks(source, request, tmp_path):
    root = request.getfixturevalue(source)
    edge, cloud = tmp_path / 'edge', tmp_path / 'cloud'
    convert(
        'merge',
        '--load-dir',
        root,
        '--save-dir-edge',
        edge,
        '--save-dir-cloud',
        cloud,
        '--merge-stages',
        '0,3',
        '--merge-cloud-stages',
        '1,2',
    )
    tps = range(1 if source == 'pp4' else 2)
    names = [f'mp_rank_{tp:02d}_000' for tp in tps]
    for side, stages in ((edge, [0, 3]), (cloud, [1, 2])):
        files = [
            f'{ITERATION}/{name}{end}' for name in names for end in ('', '/model_optim_rng.pt')
        ]
        assert tree(side) == sorted([ITERATION, TRACKER, *files])
        assert (side / TRACKER).read_text() == '2\n'
        for tp in tps:
            check_merged(load(side, f'{tp:02d}_000'), stage_files(root, tp, stages), 1, 2, len(tps))
    assert load(edge, '00_000')['args'].num_layers_per_virtual_pipeline_stage == 1
    assert load(cloud, '00_000')['args'].num_layers_per_virtual_pipeline_stage == 2


def test_middle_stages_stay_cloud_ranks(pp4, tmp_path):
    edge, cloud = merge_sides(pp4, pp4, tmp_path, '--middle-stages', '1,2')
    check_merged(load(edge, '00_000'), stage_files(pp4, 0, [0, 3]), 1, 2, 1)
    assert [name for name in tree(cloud / ITERATION) if '/' not in name] == [
        'mp_rank_00_001',
        'mp_rank_00_002',
    ]
    for rank in (1, 2):
        found, [stage] = load(cloud, f'00_{rank:03d}'), stage_files(pp4, 0, [rank])
        assert found['model1'] == {}
        check_merged(found, [stage], 3, 1, 1)


def test_two_sources_with_different_tensor_sizes(pp4, pp4_tp2, tmp_path):
    edge, cloud = merge_sides(pp4, pp4_tp2, tmp_path, '--merge-cloud-stages', '1,2')
    check_merged(load(edge, '00_000'), stage_files(pp4, 0, [0, 3]), 1, 2, 1)
    for tp in (0, 1):
        check_merged(load(cloud, f'{tp:02d}_000'), stage_files(pp4_tp2, tp, [1, 2]), 1, 2, 2)
    convert(
        'split',
        '--load-dir-edge',
        edge,
        '--load-dir-cloud',
        cloud,
        '--save-dir',
        tmp_path / 'split',
        '--num-cloud-vpp-chunks',
        '2',
    )
    assert [name[8:] for name in tree(tmp_path / 'split' / ITERATION) if '/' not in name] == [
        '00_000',
        '00_001',
        '00_002',
        '00_003',
        '01_001',
        '01_002',
    ]
    for number, (rank, source) in enumerate(
        (
            ('00_000', pp4),
            ('00_001', pp4_tp2),
            ('01_001', pp4_tp2),
            ('00_002', pp4_tp2),
            ('01_002', pp4_tp2),
            ('00_003', pp4),
        )
    ):
        before, after = load(source, rank), load(tmp_path / 'split', rank)
        for args in (before['args'], after['args']):
            assert args.tensor_model_parallel_size == (1 if source is pp4 else 2)
            args.world_size = args.inprocess_active_world_size = 6
        assert after['args'].rank == number
        before['args'].rank = number
        assert same(before, after) == []


@pytest.mark.parametrize(
    'mode, source', [('chunks', 'pp4_tp2'), ('ranks', 'pp4_tp2'), ('plain', 'pp4')]
)
def test_merge_then_split_is_the_identity(source, mode, request, tmp_path):
    root = request.getfixturevalue(source)
    merged, back = tmp_path / 'merged', tmp_path / 'back'
    if mode == 'plain':
        convert('merge', '--load-dir', root, '--save-dir', merged, '--pipeline-size', '2')
        convert('split', '--load-dir', merged, '--save-dir', back)
    else:
        merging, splitting = {
            'chunks': (['--merge-cloud-stages', '1,2'], ['--num-cloud-vpp-chunks', '2']),
            'ranks': (['--middle-stages', '1,2'], ['--middle-ranks', '1,2']),
        }[mode]
        edge, cloud = merge_sides(root, root, merged, *merging)
        convert(
            'split',
            '--load-dir-edge',
            edge,
            '--load-dir-cloud',
            cloud,
            '--save-dir',
            back,
            *splitting,
        )
    assert tree(back) == tree(root)
    assert (back / TRACKER).read_text() == '2\n'
    for path in (root / ITERATION).iterdir():
        before, after = (load(r, path.name[8:]) for r in (root, back))
        assert same(before, after) == []
        assert list(before) == list(after)


def test_split_then_merge_is_the_identity(vpp, tmp_path):
    convert('split', '--load-dir', vpp, '--save-dir', tmp_path / 'split')
    for stage, (rank, chunk) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        found, source = load(tmp_path / 'split', f'00_{stage:03d}'), load(vpp, f'00_{rank:03d}')
        assert same(found['model'], source[f'model{chunk}']) == []
        assert same(found['rng_state'], source['rng_state']) == []
        assert 'model0' not in found
        assert found['args'].virtual_pipeline_model_parallel_size is None
        assert found['args'].num_layers_per_virtual_pipeline_stage is None
        assert found['args'].pipeline_model_parallel_size == 4
    convert(
        'merge',
        '--load-dir',
        tmp_path / 'split',
        '--save-dir',
        tmp_path / 'again',
        '--pipeline-size',
        '2',
    )
    for rank in ('00_000', '00_001'):
        before, after = load(vpp, rank), load(tmp_path / 'again', rank)
        del after['pipeline_stage_states']
        assert same(before, after) == []


def test_reshape_routes_each_layer_and_back(pp4, tmp_path):
    convert(
        'reshape',
        '--load-dir',
        pp4,
        '--save-dir',
        tmp_path / 'new',
        '--pipeline-size',
        '2',
        '--virtual-size',
        '2',
        '--layers-per-chunk',
        '2,0,1,3',
    )
    old = stage_files(pp4, 0, range(4))
    layers = [
        {k.split('.', 3)[3]: v for k, v in stage['model'].items() if f'layers.{n}.' in k}
        for stage in old
        for n in range(3)
        if f'decoder.layers.{n}.input_layernorm.weight' in stage['model']
    ]
    assert len(layers) == 6
    first = 0
    for (rank, chunk), count in zip([(0, 0), (1, 0), (0, 1), (1, 1)], [2, 0, 1, 3], strict=True):
        state = load(tmp_path / 'new', f'00_{rank:03d}')[f'model{chunk}']
        for n in range(count):
            for rest, value in layers[first + n].items():
                assert same(state.pop(f'decoder.layers.{n}.{rest}'), value) == []
        first += count
        ends = {(0, 0): old[0], (1, 1): old[3]}.get((rank, chunk), {'model': {}})['model']
        assert same(state, {k: v for k, v in ends.items() if 'layers.' not in k}) == []
    assert load(tmp_path / 'new', '00_000')['args'].pipeline_model_parallel_layout == 'Ett||t|tttL'
    convert(
        'reshape',
        '--load-dir',
        tmp_path / 'new',
        '--save-dir',
        tmp_path / 'back',
        '--pipeline-size',
        '4',
        '--virtual-size',
        '1',
        '--layers-per-chunk',
        '1,2,2,1',
    )
    for stage in range(4):
        after = load(tmp_path / 'back', f'00_{stage:03d}')
        for key in ('model', 'optimizer'):
            assert same(old[stage][key], after[key]) == []
            assert list(old[stage]['model']) == list(after['model'])


@pytest.mark.parametrize('layers, layout', [('2,2,1,1', 'Ett|tt|t|tL'), ('1,2,1,2', 'Et|tt|t|ttL')])
def test_reshape_to_the_same_sizes_says_where_the_layers_are(pp4, tmp_path, layers, layout):
    sizes = ['--pipeline-size', '4', '--virtual-size', '1', '--layers-per-chunk', layers]
    convert('reshape', '--load-dir', pp4, '--save-dir', tmp_path / 'out', *sizes)
    for stage in range(4):
        args = load(tmp_path / 'out', f'00_{stage:03d}')['args']
        assert args.pipeline_model_parallel_layout == layout
        assert args.decoder_first_pipeline_num_layers is None
        assert args.decoder_last_pipeline_num_layers is None


def test_drop_optimizer(pp4, tmp_path, capsys):
    convert(
        'merge',
        '--load-dir',
        pp4,
        '--save-dir',
        tmp_path / 'out',
        '--pipeline-size',
        '2',
        '--drop-optimizer',
    )
    found = load(tmp_path / 'out', '00_001')
    assert 'optimizer' not in found
    assert same(found['model1'], load(pp4, '00_003')['model']) == []
    assert '--no-load-optim' in capsys.readouterr().err


@pytest.mark.parametrize('args', ['missing', None])
def test_args_missing_or_none_are_kept_so_with_one_note(pp4, tmp_path, capsys, args):
    shutil.copytree(pp4, tmp_path / 'source')
    for stage in range(4):
        state = load(tmp_path / 'source', f'00_{stage:03d}')
        if args is None:
            state['args'] = None
        else:
            del state['args']
        save(state, tmp_path / 'source', f'00_{stage:03d}')
    convert(
        'merge',
        '--load-dir',
        tmp_path / 'source',
        '--save-dir',
        tmp_path / 'out',
        '--pipeline-size',
        '2',
    )
    found = load(tmp_path / 'out', '00_000')
    assert found.get('args', 'missing') == args
    assert capsys.readouterr().err.count('note:') == 1


def test_release_directory(pp4, tmp_path):
    source, out = tmp_path / 'source', tmp_path / 'out'
    shutil.copytree(pp4 / ITERATION, source / 'release')
    (source / TRACKER).write_text('release\n')
    convert('merge', '--load-dir', source, '--save-dir', out, '--pipeline-size', '2')
    assert (out / TRACKER).read_text() == 'release\n'
    assert same(load(out, '00_000', 'release')['model0'], load(pp4, '00_000')['model']) == []


def test_named_iteration_wins_over_the_tracker(pp4, tmp_path):
    shutil.copytree(pp4, tmp_path / 'source')
    (tmp_path / 'source' / TRACKER).write_text('9')
    convert(
        'merge',
        '--load-dir',
        tmp_path / 'source',
        '--save-dir',
        tmp_path / 'out',
        '--pipeline-size',
        '2',
        '--iteration',
        '2',
    )
    assert (tmp_path / 'out' / TRACKER).read_text() == '2\n'


def test_dry_run_prints_the_mapping_and_writes_nothing(pp4, tmp_path, capsys):
    merge = [
        'merge',
        '--load-dir',
        pp4,
        '--save-dir-edge',
        tmp_path / 'e',
        '--save-dir-cloud',
        tmp_path / 'c',
        '--merge-stages',
        '0,3',
        '--merge-cloud-stages',
        '1,2',
        '--dry-run',
    ]
    convert(*merge)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2:6] == [
        ['edge', '(0,', '0,', '-)', '0', 'edge', '(0,', '0,', '0)', 'embedding'],
        ['cloud', '(0,', '1,', '-)', '1-2', 'cloud', '(0,', '0,', '0)'],
        ['cloud', '(0,', '2,', '-)', '3-4', 'cloud', '(0,', '0,', '1)'],
        ['edge', '(0,', '3,', '-)', '5', 'edge', '(0,', '0,', '1)', 'final', 'norm,', 'head'],
    ]
    assert tree(tmp_path) == []


def test_views_into_a_shared_buffer_are_cut_out(pp4, tmp_path):
    """The distributed optimizer keeps parameters as views of one buffer, and so they are saved."""
    shutil.copytree(pp4, tmp_path / 'source')
    for stage in range(4):
        state = load(pp4, f'00_{stage:03d}')
        values = {k: v for k, v in state['model'].items() if isinstance(v, torch.Tensor)}
        buffer = torch.cat([value.reshape(-1) for value in values.values()])
        at = 0
        for key, value in values.items():
            state['model'][key] = buffer[at : at + value.numel()].view(value.shape)
            at += value.numel()
        save(state, tmp_path / 'source', f'00_{stage:03d}')
    convert(
        'reshape',
        '--load-dir',
        tmp_path / 'source',
        '--save-dir',
        tmp_path / 'out',
        '--pipeline-size',
        '6',
        '--virtual-size',
        '1',
    )
    found = load(tmp_path / 'out', '00_002')
    weight = found['model']['decoder.layers.0.mlp.linear_fc1.weight']
    assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    assert (
        same(weight, load(pp4, '00_001')['model']['decoder.layers.1.mlp.linear_fc1.weight']) == []
    )
