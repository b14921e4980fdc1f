"""Weighted merge: exactness, command line, common state, options, and what is refused."""

import argparse
import io
import json
import math
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing

from tests.unit_tests.tools.checkpoint.handmade import (
    LAYOUT,
    assert_same,
    load_tensors,
    model_tensors,
    plain_merge,
    set_common_form,
    tree,
    write_checkpoint,
    write_run,
)
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.merge.inputs import explicit_inputs
from tools.checkpoint.merge.prepare import Request
from tools.checkpoint.merge.run import run_merge
from tools.checkpoint.weighted_merge import checkpoint_coefficients, main
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

EXTRA = {'decoder.layers.mlp.linear_fc1._extra_state': b'never unpickled \x80\x05.'}
ROUTER = 'decoder.layers.mlp.router.expert_bias'


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """Root, paths and tensors of five checkpoints of one bf16 run with an fp32 router bias."""
    root = tmp_path_factory.mktemp('run')
    paths, models = write_run(root, [100, 200, 300, 400, 500], extra_states=EXTRA)
    return root, paths, models


@pytest.fixture
def out(tmp_path):
    return tmp_path / 'out'


def copied(source, target):
    """A copy of a checkpoint that a test may damage."""
    shutil.copytree(source, target)
    return target


# --- weights


@pytest.mark.parametrize(
    'style, expected',
    [
        ('linear', [1 / 3, 1 / 3, 1 / 3]),
        ('minus-sqrt', [0.577350, 0.239146, 0.183503]),
        ('minus-sqrt__reverse', [0.183503, 0.239146, 0.577350]),
        ('cosine', [0.25, 0.5, 0.25]),
        ('inverse-sqrt', [2 - math.sqrt(2), math.sqrt(2) - 2 / math.sqrt(3), 2 / math.sqrt(3) - 1]),
    ],
)
def test_schedules_of_three(style, expected):
    weights = checkpoint_coefficients([300, 100, 200], style)
    assert list(weights) == [100, 200, 300]
    assert list(weights.values()) == pytest.approx(expected, abs=5e-7)


def test_schedule_of_five_and_of_one():
    weights = checkpoint_coefficients(range(5), 'minus-sqrt')
    assert [round(w, 6) for w in weights.values()] == [
        0.447214,
        0.185242,
        0.142141,
        0.119831,
        0.105573,
    ]
    for style in ('linear', 'minus-sqrt', 'cosine', 'inverse-sqrt'):
        assert checkpoint_coefficients([7], style) == {7: 1.0}
        for n in range(1, 40):
            assert sum(checkpoint_coefficients(range(n), style).values()) == pytest.approx(1)
    assert set(checkpoint_coefficients(range(7), 'linear').values()) == {1 / 7}


def test_scramble_is_a_permutation_fixed_by_its_seed():
    plain = checkpoint_coefficients(range(20), 'minus-sqrt')
    one = checkpoint_coefficients(range(20), 'minus-sqrt__scramble')
    assert one == checkpoint_coefficients(range(20), 'minus-sqrt__scramble', seed=0)
    assert one != checkpoint_coefficients(range(20), 'minus-sqrt__scramble', seed=1)
    assert list(one.values()) != list(plain.values())
    assert sorted(one.values()) == sorted(plain.values())


@pytest.mark.parametrize(
    'iterations, style',
    [
        ([1, 1], 'linear'),
        ([], 'linear'),
        ([1], 'sqrt'),
        ([1], 'linear__twice'),
        ([1], 'linear__'),
        ([1], 'linear__reverse__scramble'),
    ],
)
def test_impossible_schedules(iterations, style):
    with pytest.raises(ValueError):
        checkpoint_coefficients(iterations, style)


# --- exactness


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize('weights', [[0.5, 0.3, 0.2], [-0.7, 2.1, 1 / 3], [1e-8, 0.0, 1.0]])
def test_bit_identical_to_the_plain_loop(tmp_path, dtype, weights):
    paths, models = write_run(tmp_path, [1, 2, 3], dtype)
    for block in (1, 7, 64, 1000, 1 << 17):
        if block == 1 and dtype != torch.bfloat16:
            continue
        out = tmp_path / f'out-{block}'
        run_merge(
            Request(lambda: explicit_inputs(paths, weights), out, block_elements=block, threads=2)
        )
        assert_same(load_tensors(out), plain_merge(models, weights))


def test_large_odd_tensors_against_the_whole_tensor_loop(tmp_path):
    generator = torch.Generator().manual_seed(0)
    models = [
        {'decoder.w': torch.randn(3, 333_331, generator=generator).bfloat16()} for _ in range(4)
    ]
    paths = [write_checkpoint(tmp_path / f'{i}', m) for i, m in enumerate(models)]
    weights = [0.1, 0.2, 0.30000001, 0.4]
    result = merge(paths, weights, tmp_path / 'out', verify=True)
    assert_same(load_tensors(tmp_path / 'out'), plain_merge(models, weights))
    assert result.bytes_read == 4 * 3 * 333_331 * 2


@pytest.mark.parametrize('save', ['float32', 'float16', 'bfloat16'])
def test_save_dtype(run, out, save):
    _, paths, models = run
    result = merge(paths[:2], [0.5, 0.5], out, save_dtype=save)
    expected = plain_merge(models[:2], [0.5, 0.5], getattr(torch, save))
    assert_same(load_tensors(out), expected)
    assert result.narrowed == ([] if save == 'float32' else [ROUTER])


def test_keep_fp32_holds_back(run, out):
    _, paths, models = run
    result = merge(paths[:2], [0.5, 0.5], out, save_dtype='float16', keep_fp32=['*.expert_bias'])
    expected = plain_merge(models[:2], [0.5, 0.5], torch.float16)
    expected[ROUTER] = plain_merge(models[:2], [0.5, 0.5])[ROUTER]
    assert_same(load_tensors(out), expected)
    assert result.narrowed == []


def test_inputs_of_different_dtype_need_an_explicit_one(tmp_path):
    models = [model_tensors(1, torch.float32), model_tensors(2, torch.bfloat16)]
    paths = [write_checkpoint(tmp_path / f'{i}', m) for i, m in enumerate(models)]
    with pytest.raises(CheckpointError, match='dtype torch.bfloat16, expected torch.float32'):
        merge(paths, [0.5, 0.5], tmp_path / 'out')
    merge(paths, [0.5, 0.5], tmp_path / 'out', save_dtype='bfloat16', verify=True)
    assert_same(load_tensors(tmp_path / 'out'), plain_merge(models, [0.5, 0.5], torch.bfloat16))


def test_one_checkpoint_with_weight_one_comes_back(run, out):
    _, paths, models = run
    merge(paths[:1], [1.0], out)
    assert_same(load_tensors(out), models[0])


def test_merging_its_own_balanced_output_again(run, tmp_path):
    _, paths, models = run
    merge(paths[:2], [0.5, 0.5], tmp_path / 'a', balance_rank_work=True)
    again = merge([tmp_path / 'a', paths[2]], [0.5, 0.5], tmp_path / 'b', verify=True)
    expected = plain_merge([plain_merge(models[:2], [0.5, 0.5]), models[2]], [0.5, 0.5])
    assert_same(load_tensors(tmp_path / 'b'), expected)
    assert again.averaged_tensors == len(expected) and again.copied_extra_states == 1


def test_scalars_empty_and_strided_tensors(tmp_path):
    """What a plain DCP save can hold besides: read through torch.load where it isn't plain."""
    paths = []
    models = [
        {
            'model.scalar': torch.tensor(1.5 + s),
            'model0.empty': torch.empty(0, 4),
            'model12.strided': torch.arange(30.0).view(5, 6).t() * (s + 1),
            'decoder.double': torch.randn(7, dtype=torch.float64),
            'mtp.half': torch.arange(8.0).mul(s + 1).half(),
        }
        for s in range(3)
    ]
    for index, model in enumerate(models):
        path = tmp_path / f'{index}'
        dcp.save(model, checkpoint_id=path, no_dist=True)
        (path / 'metadata.json').write_text('{"sharded_backend": "torch_dist"}')
        paths.append(path)
    merge(paths, [0.5, 0.25, 0.25], tmp_path / 'out', verify=True)
    found = {key: torch.empty_like(value) for key, value in models[0].items()}
    dcp.load(found, checkpoint_id=tmp_path / 'out', no_dist=True)
    for key, value in plain_merge(models, [0.5, 0.25, 0.25]).items():
        assert torch.equal(found[key].float(), value.float()), key


# --- chunk layouts


def test_differing_layouts_need_allow_reshard(tmp_path):
    models = [model_tensors(s) for s in range(3)]
    layouts = [
        LAYOUT,
        {
            'decoder.layers.self_attention.linear_qkv.weight': (2, 3),
            'output_layer.weight': (1, 2),
            'embedding.word_embeddings.weight': (1, 4),
        },
        {},
    ]
    paths = [
        write_checkpoint(tmp_path / f'{i}', model, layout=layout)
        for i, (model, layout) in enumerate(zip(models, layouts, strict=True))
    ]
    weights = [0.5, 0.3, 0.2]
    with pytest.raises(CheckpointError, match='chunk layout .* --allow-reshard'):
        merge(paths, weights, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
    for first in range(3):
        order = [(first + i) % 3 for i in range(3)]
        out = tmp_path / f'out{first}'
        merge([paths[i] for i in order], weights, out, allow_reshard=True, verify=True)
        assert_same(load_tensors(out), plain_merge([models[i] for i in order], weights))
        # the output has the first source's layout: merges with it without the switch
        merge([out, paths[order[0]]], [0.5, 0.5], tmp_path / f'again{first}')


# --- command line


def cli(*arguments):
    return main([str(argument) for argument in arguments])


def test_manual_mode_with_colons_in_a_path_and_a_root(run, tmp_path, capsys):
    root, paths, models = run
    odd = copied(paths[0], tmp_path / 'a:0.5:b')
    assert (
        cli('--merge-inputs', f'{odd}:0.25', f'{root}:0.75', '--merge-output', tmp_path / 'out')
        == 0
    )
    assert_same(load_tensors(tmp_path / 'out'), plain_merge([models[0], models[4]], [0.25, 0.75]))
    assert not (tmp_path / 'latest_checkpointed_iteration.txt').exists()
    assert 'warning' not in capsys.readouterr().out


def test_weights_are_used_exactly_with_a_warning_or_normalised(run, tmp_path, capsys):
    _, paths, models = run
    pairs = [f'{paths[0]}:3', f'{paths[1]}:-1']
    assert cli('--merge-inputs', *pairs, '--merge-output', tmp_path / 'a') == 0
    assert 'weights sum to 2 (smallest -1)' in capsys.readouterr().out
    assert_same(load_tensors(tmp_path / 'a'), plain_merge(models[:2], [3, -1]))
    assert cli('--merge-inputs', *pairs, '--normalize', '--merge-output', tmp_path / 'b') == 0
    assert_same(load_tensors(tmp_path / 'b'), plain_merge(models[:2], [1.5, -0.5]))


def test_range_mode(run, tmp_path, capsys):
    root, _, models = run
    assert (
        cli(
            '--merge-inputs',
            root,
            '--start-checkpoint',
            150,
            '--end-checkpoint',
            400,
            '--merge-style',
            'minus-sqrt',
            '--merge-output',
            tmp_path,
        )
        == 0
    )
    out = tmp_path / 'iter_0000400'
    weights = list(checkpoint_coefficients([200, 300, 400], 'minus-sqrt').values())
    assert_same(load_tensors(out), plain_merge(models[1:4], weights))
    assert (tmp_path / 'latest_checkpointed_iteration.txt').read_text() == '400'
    common = dist_checkpointing.load_common_state_dict(str(out))
    provenance = common['weighted_merge_provenance']
    assert common['iteration'] == 400
    assert provenance['iterations'] == [200, 300, 400] and provenance['weights'] == weights
    assert provenance['merge_style'] == 'minus-sqrt'
    assert provenance['implementation'] == 'dcp-metadata-same-layout'
    assert provenance['common_state_source'].endswith('iter_0000400')
    assert provenance['extra_state_source'].endswith('iter_0000200')


def test_range_interval_walks_back_from_the_end(run, tmp_path):
    root, _, models = run
    assert (
        cli(
            '--merge-inputs',
            root,
            '--start-checkpoint',
            0,
            '--end-checkpoint',
            500,
            '--min-iteration-interval',
            150,
            '--min-checkpoints',
            3,
            '--merge-output',
            tmp_path / 'iter_0000007',
            '--output-iteration',
            7,
        )
        == 0
    )
    kept = [models[0], models[2], models[4]]
    assert_same(load_tensors(tmp_path / 'iter_0000007'), plain_merge(kept, [1 / 3] * 3))
    assert (tmp_path / 'latest_checkpointed_iteration.txt').read_text() == '7'


@pytest.mark.parametrize(
    'name, text',
    [
        ('w.json', '{"100": 0.75, "200": 0.25}'),
        ('w.yaml', '100: 0.75\n200: 0.25\n'),
    ],
)
def test_coefficients_file(run, tmp_path, name, text):
    root, _, models = run
    (tmp_path / name).write_text(text)
    assert (
        cli(
            '--merge-inputs',
            root,
            '--start-checkpoint',
            100,
            '--end-checkpoint',
            200,
            '--coefficients',
            tmp_path / name,
            '--merge-output',
            tmp_path / 'out',
        )
        == 0
    )
    assert_same(load_tensors(tmp_path / 'out/iter_0000200'), plain_merge(models[:2], [0.75, 0.25]))


@pytest.mark.parametrize(
    'text, message',
    [
        ('{"100": 0.75}', 'without a weight: [200]'),
        ('{"100": 1, "200": 1, "3": 1}', 'not in the'),
        ('[1]', 'holds list'),
        ('{', 'no JSON'),
        ('{"100": "x", "200": 1}', 'expected an iteration'),
        ('{"100": 1, "100": 2, "200": 1}', '100 twice'),
        ('{"100": NaN, "200": 1}', 'not finite'),
        ('{"100": true, "200": 1}', 'expected an iteration'),
    ],
)
def test_coefficients_file_that_is_wrong(run, tmp_path, capsys, text, message):
    (tmp_path / 'w.json').write_text(text)
    assert (
        cli(
            '--merge-inputs',
            run[0],
            '--start-checkpoint',
            100,
            '--end-checkpoint',
            200,
            '--coefficients',
            tmp_path / 'w.json',
            '--merge-output',
            tmp_path / 'out',
        )
        == 1
    )
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_dry_run_prints_the_plan_and_writes_nothing(run, tmp_path, capsys):
    root, paths, _ = run
    before = tree(tmp_path)
    assert (
        cli(
            '--merge-inputs',
            f'{paths[0]}:0.5',
            f'{paths[1]}:0.5',
            '--dry-run',
            '--verify',
            '--merge-output',
            tmp_path / 'deep/out',
            '--output-iteration',
            5,
        )
        == 0
    )
    text = capsys.readouterr().out
    for part in (str(paths[1]), 'weight 0.5', '6 tensors', 'deep/out/iter_0000005', 'to read by 1'):
        assert part in text
    assert tree(tmp_path) == before and not (tmp_path / 'deep').exists()


def test_report_and_its_json(run, tmp_path, capsys):
    _, paths, _ = run
    assert (
        cli(
            '--merge-inputs',
            f'{paths[0]}:0.5',
            f'{paths[1]}:0.5',
            '--merge-output',
            tmp_path / 'out',
            '--report-json',
            tmp_path / 'r.json',
        )
        == 0
    )
    text = capsys.readouterr().out
    for part in ('discovery', 'load', 'accumulate', 'save', 'peak host memory', '/s, wrote'):
        assert part in text
    report = json.loads((tmp_path / 'r.json').read_text())
    assert report['averaged_tensors'] == 6 and report['copied_extra_states'] == 1
    assert report['timings']['total'] > 0 and report['output_dir'] == str(tmp_path / 'out')
    written = sum(len(data) for data in tree(tmp_path / 'out').values())
    assert report['bytes_written'] == written


@pytest.mark.parametrize('accounting', ['rank0', 'each-rank', 'none'])
def test_byte_accounting(run, out, accounting):
    result = merge(run[1][:2], [0.5, 0.5], out, byte_accounting=accounting)
    written = sum(len(data) for data in tree(out).values())
    tensors = sum(t.nbytes for t in run[2][0].values())
    assert result.bytes_written == written or (
        accounting == 'none' and tensors < result.bytes_written < written
    )


@pytest.mark.parametrize(
    'arguments',
    [
        [],
        ['--merge-inputs', 'a:1'],
        ['--merge-output', 'o'],
        ['--merge-inputs', 'a:1', '--merge-output', 'o', '--merge-style', 'sqrt'],
        ['--merge-inputs', 'a:1', '--merge-output', 'o', '--merge-style', 'linear'],
        [
            '--merge-inputs',
            'a',
            'b',
            '--merge-output',
            'o',
            '--start-checkpoint',
            '1',
            '--end-checkpoint',
            '2',
        ],
        [
            '--merge-inputs',
            'a',
            '--merge-output',
            'o',
            '--start-checkpoint',
            '1',
            '--end-checkpoint',
            '2',
            '--normalize',
        ],
        ['--merge-inputs', 'a', '--merge-output', 'o', '--start-checkpoint', 'x'],
    ],
)
def test_wrong_usage_exits_with_2(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_help_is_complete(capsys):
    with pytest.raises(SystemExit):
        main(['--help'])
    text = ' '.join(capsys.readouterr().out.split())
    for part in ('OLDEST', '--coefficient-seed', '--keep-fp32', '--trust-checkpoints', 'torchrun'):
        assert part in text


@pytest.mark.parametrize(
    'extra, message',
    [
        (['--start-checkpoint', 300, '--end-checkpoint', 200], 'lies after'),
        (
            ['--start-checkpoint', 100, '--end-checkpoint', 250],
            'no checkpoint of iteration 250; found',
        ),
        (
            ['--start-checkpoint', 450, '--end-checkpoint', 500, '--min-checkpoints', 2],
            'asks for 2',
        ),
        (['--end-checkpoint', 500], 'both --start-checkpoint and --end-checkpoint'),
    ],
)
def test_ranges_that_are_wrong(run, tmp_path, capsys, extra, message):
    assert cli('--merge-inputs', run[0], *extra, '--merge-output', tmp_path / 'out') == 1
    error = capsys.readouterr().err
    assert message in error and error.count('\n') == 1
    assert not (tmp_path / 'out').exists()


# --- output and common state


def test_output_directory_names(run, tmp_path):
    _, paths, _ = run
    pair, weights = paths[:2], [0.5, 0.5]
    assert merge(pair, weights, tmp_path / 'a', 7).output_dir == tmp_path / 'a/iter_0000007'
    named = tmp_path / 'b/iter_0000007'
    assert merge(pair, weights, named, 7).output_dir == named
    with pytest.raises(CheckpointError, match='another iteration, expected iter_0000008'):
        merge(pair, weights, tmp_path / 'c/iter_0000007', 8)
    with pytest.raises(CheckpointError, match='exists'):
        merge(pair, weights, tmp_path / 'a', 7)
    (tmp_path / 'link').symlink_to(pair[0])
    with pytest.raises(CheckpointError, match='inside the input'):
        merge(pair, weights, tmp_path / 'link' / 'below')
    with pytest.raises(CheckpointError, match='inside the input'):
        merge(pair, weights, paths[0] / 'out')
    assert sorted(p.name for p in tmp_path.iterdir()) == ['a', 'b', 'link']


def test_common_state_forms_mix_and_the_iteration_decides(run, tmp_path):
    _, paths, _ = run
    legacy = copied(paths[1], tmp_path / 'iter_0000200')
    args = argparse.Namespace(iteration=200, lr=0.5)
    set_common_form(legacy, {'iteration': 200, 'args': args, 'who': 'legacy'}, 'legacy')
    bare = copied(paths[2], tmp_path / 'bare')
    set_common_form(bare, None, None)
    weights = [0.2, 0.3, 0.5]

    embedded = copied(paths[0], tmp_path / 'iter_0000100')
    set_common_form(embedded, {'iteration': 100}, 'embedded')
    inputs = [bare, embedded, legacy]

    def common(iteration, name):
        out = merge(inputs, weights, tmp_path / name, iteration).output_dir
        return dist_checkpointing.load_common_state_dict(str(out))

    state = common(200, 'a')
    assert state['who'] == 'legacy' and state['args'].lr == 0.5
    state = common(9, 'b')  # no input records it: the first that has common state
    assert state['iteration'] == 9 and 'who' not in state
    inputs, weights = inputs[::-1], weights[::-1]
    state = common(9, 'c')
    assert state['iteration'] == 9 and state['args'].iteration == 9 and state['who'] == 'legacy'
    assert torch.load(legacy / 'common.pt')['args'].iteration == 200


def test_model_shards_only_and_a_given_common_state(run, tmp_path):
    _, paths, models = run
    bare = [copied(path, tmp_path / path.name) for path in paths[:2]]
    for path in bare:
        set_common_form(path, None, None)
    result = merge(bare, [0.5, 0.5], tmp_path / 'none')
    assert any('no input has common state' in text for text in result.warnings)
    state = torch.load(tmp_path / 'none/common.pt')
    assert list(state) == ['weighted_merge_provenance']
    given = copied(paths[2], tmp_path / 'given')
    merge(bare, [0.5, 0.5], tmp_path / 'out', 300, common_state_checkpoint=given, verify=True)
    state = torch.load(tmp_path / 'out/iter_0000300/common.pt')
    assert state['iteration'] == 300
    assert state['weighted_merge_provenance']['extra_state_source'] == str(given)
    with pytest.raises(CheckpointError, match='records iteration 300, but --output-iteration is 5'):
        merge(bare, [0.5, 0.5], tmp_path / 'x', 5, common_state_checkpoint=given)
    with pytest.raises(CheckpointError, match='no common state'):
        merge(bare, [0.5, 0.5], tmp_path / 'x', 5, common_state_checkpoint=bare[0])
    assert not (tmp_path / 'x').exists()


def test_both_forms_or_another_embedded_layout_are_refused(run, tmp_path):
    both = copied(run[1][0], tmp_path / 'both')
    set_common_form(both, {'iteration': 100}, 'embedded')
    torch.save({'iteration': 100}, both / 'common.pt')
    with pytest.raises(CheckpointError, match='common state both in'):
        merge([both], [1], tmp_path / 'out')
    other = copied(run[1][0], tmp_path / 'other')
    set_common_form(other, {'iteration': 100}, 'embedded')
    metadata = dcp.FileSystemReader(other).read_metadata()
    entries = metadata.state_dict_metadata
    entries['common_state/shard_0_2'] = entries.pop('common_state/shard_0_1')
    (other / '.metadata').write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match='stored as common_state/shard_0_2'):
        merge([other], [1], tmp_path / 'out')


def test_extra_state_comes_from_the_chosen_input(tmp_path):
    key = 'decoder.layers.mlp.linear_fc1._extra_state'
    paths = [
        write_checkpoint(tmp_path / f'{i}', model_tensors(i), extra_states={key: data})
        for i, data in enumerate([b'zero', b'one'])
    ]

    def stored(out):
        state = {f'{key}/shard_0_1': io.BytesIO()}
        planner = dcp.DefaultLoadPlanner()
        found = {}
        planner.load_bytes = lambda item, value: found.update({item.dest_index.fqn: value})
        dcp.load(state, checkpoint_id=out, no_dist=True, planner=planner)
        return torch.load(found[f'{key}/shard_0_1'], weights_only=True)

    for index, expected in ((None, b'zero'), (0, b'zero'), (1, b'one')):
        out = merge(
            paths, [0.5, 0.5], tmp_path / f'out{index}', extra_state_source_index=index
        ).output_dir
        assert stored(out) == [expected]
    with pytest.raises(CheckpointError, match='expected 0 to 1'):
        merge(paths, [0.5, 0.5], tmp_path / 'x', extra_state_source_index=2)


# --- checks of values


def with_value(tmp_path, name, value, dtype=torch.bfloat16):
    model = model_tensors(3, dtype)
    model['output_layer.weight'][77, 5] = value
    return write_checkpoint(tmp_path / name, model), model


@pytest.mark.parametrize('value', [math.inf, -math.inf, math.nan])
def test_nonfinite_inputs(tmp_path, value):
    bad, model = with_value(tmp_path, 'bad', value)
    good = write_checkpoint(tmp_path / 'good', model_tensors(4))
    for pair in ([bad, good], [good, bad]):
        with pytest.raises(CheckpointError, match='bad.*output_layer.weight: 1 values.*nonfinite'):
            merge(pair, [0.5, 0.5], tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
    result = merge([bad, good], [0.5, 0.5], tmp_path / 'out', allow_nonfinite=True, verify=True)
    assert result.nonfinite_inputs == {f'{bad}: output_layer.weight': 1}
    found = load_tensors(tmp_path / 'out')['output_layer.weight']
    assert int((~torch.isfinite(found)).sum()) == 1 and not math.isfinite(found[77, 5])


@pytest.mark.parametrize(
    'value, weights, save',
    [
        (6e4, [2, 0], 'float16'),
        (-7e4, [1, 0], 'float16'),
        (3e38, [2, 0], 'same'),
        (3e38, [2, -1], 'same'),
        (3.397e38, [1, 0], 'bfloat16'),
        (3e38, [1.2, 0], 'float32'),
    ],
)
def test_overflow_of_merge_or_cast_ends_the_run(tmp_path, value, weights, save):
    bad, _ = with_value(tmp_path, 'bad', value, torch.float32)
    good = write_checkpoint(tmp_path / 'good', model_tensors(4, torch.float32))
    for allow in (False, True):
        with pytest.raises(CheckpointError, match='output_layer.weight: the merged value'):
            merge([bad, good], weights, tmp_path / 'out', save_dtype=save, allow_nonfinite=allow)
    assert not (tmp_path / 'out').exists()


def test_large_but_representable_values_pass(tmp_path):
    big, model = with_value(tmp_path, 'big', 6.5e4, torch.float16)
    model['decoder.final_layernorm.weight'][:] = 6.5e4
    paths = [big, write_checkpoint(tmp_path / 'other', model)]
    merge(paths, [0.5, 0.5], tmp_path / 'out', verify=True)


@pytest.mark.parametrize(
    'weights, options, message',
    [
        ([math.nan, 1], {}, 'not finite'),
        ([math.inf, 1], {}, 'not finite'),
        ([1e39, 1], {}, 'not finite in fp32'),
        ([1, -1], {'normalize': True}, 'positive sum'),
        ([-1, -2], {'normalize': True}, 'positive sum'),
        ([1], {}, '2 checkpoints, but 1 weights'),
        ([1, 1], {'save_dtype': 'int8'}, 'save dtype'),
        ([1, 1], {'byte_accounting': 'x'}, 'byte acc'),
        ([1, 1], {'keep_fp32': ['*']}, 'no effect'),
        ([1, 1], {'keep_fp32': ['*.bais'], 'save_dtype': 'bfloat16'}, 'matches none'),
        ([1, 1], {'output_iteration': -1}, 'expected 0 or more'),
    ],
)
def test_wrong_weights_and_options(run, out, weights, options, message):
    with pytest.raises(ValueError, match=message):
        merge(run[1][:2], weights, out, **options)
    assert not out.exists()


def test_the_same_checkpoint_twice_is_refused(run, out, tmp_path):
    (tmp_path / 'link').symlink_to(run[1][0])
    with pytest.raises(CheckpointError, match='given twice'):
        merge([run[1][0], tmp_path / 'link'], [0.5, 0.5], out)


# --- library use


def test_many_times_in_one_process(run, tmp_path):
    _, paths, models = run
    expected = plain_merge(models[:2], [0.5, 0.5])
    threads = torch.get_num_threads()
    for index in range(5):
        merge(paths[:2], [0.5, 0.5], tmp_path / f'{index}')
    assert_same(load_tensors(tmp_path / '4'), expected)
    assert torch.get_num_threads() == threads


def test_verify_detects_a_wrong_output(run, out, monkeypatch):
    from tools.checkpoint.merge import accumulate

    def wrong(self, job, readers, start, target, right=accumulate.ChunkMerger._merge_block):
        right(self, job, readers, start, target)
        if job.key == ROUTER:
            target[3] += 1e-3

    monkeypatch.setattr(accumulate.ChunkMerger, '_merge_block', wrong)
    with pytest.raises(CheckpointError, match=f'{ROUTER} .*differs from the weighted sum'):
        merge(run[1][:2], [0.5, 0.5], out, verify=True)
    assert not out.exists()


def test_integrity_manifests_are_checked_and_written(run, tmp_path):
    _, paths, _ = run
    source = copied(paths[0], tmp_path / 'source')
    merge([source, paths[1]], [0.5, 0.5], tmp_path / 'a', save_integrity=True)
    validation = dist_checkpointing.validation
    if hasattr(validation, 'verify_integrity_manifest'):  # core 0.19
        validation.verify_integrity_manifest(str(tmp_path / 'a'))
    merge([tmp_path / 'a', paths[1]], [0.5, 0.5], tmp_path / 'b', verify=True)
    file = tmp_path / 'a/__0_0.distcp'
    data = bytearray(file.read_bytes())
    data[-100] ^= 1  # in the archive's directory: the tensors are still as they were
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match='__0_0.distcp: SHA-256 .* the file has changed'):
        merge([tmp_path / 'a', paths[1]], [0.5, 0.5], tmp_path / 'c', verify=True)
    assert not (tmp_path / 'c').exists()
