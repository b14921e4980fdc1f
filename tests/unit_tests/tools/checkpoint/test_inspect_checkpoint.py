"""The inspector on checkpoints that real megatron-core wrote, and on what is none."""

import argparse
import json
import os
import pickle
import queue
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed import checkpoint as dcp

from tests.cpu_megatron import session
from tests.cpu_megatron.torchrun import REPOSITORY
from tests.cpu_megatron.whole_checkpoint import read_tensors
from tests.unit_tests.tools.checkpoint.handmade import (
    model_tensors,
    set_common_form,
    write_checkpoint,
)
from tests.unit_tests.tools.checkpoint.pp_vpp_damage import edit, exchange, narrow, pop, put
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.convert_ckpt_pp_vpp import main as convert
from tools.checkpoint.inspect_checkpoint import compare_checkpoints, inspect_checkpoint, main
from tools.checkpoint.inspection import uses
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

QKV = 'decoder.layers.self_attention.linear_qkv.weight'
TRACKER = 'latest_checkpointed_iteration.txt'
EXPERTS = {
    'bf16': True,
    'num_moe_experts': 4,
    'moe_router_load_balancing_type': 'none',
    'moe_router_score_function': 'sigmoid',
    'moe_router_enable_expert_bias': True,
}


@pytest.fixture(scope='module')
def real(tmp_path_factory):
    """Checkpoints by name, each of a run of one or two steps or of a model alone."""
    root = tmp_path_factory.mktemp('real')
    filesystem_async._results_queue = queue.Queue()  # instead of a manager process of 3 s
    with session.model_parallel():
        run = session.Training.start(
            session.gpt(bf16=True), session.distributed_optimizer(bf16=True)
        )
        run.train(1)
        run.save(root / 'gpt/iter_0000001')
        run.train(1)
        run.save(root / 'gpt/iter_0000002')
        run.save(root / 'buckets', 'dp_reshardable')
        save_plain(session.gpt(), root / 'plain')
        run = session.Training.start(
            session.gpt(**EXPERTS), session.distributed_optimizer(bf16=True)
        )
        run.train(1)
        run.save(root / 'moe run')
        for name, model in {
            'moe': session.gpt(**EXPERTS),
            'mixed': session.gpt(**EXPERTS, moe_layer_freq=[0, 1]),
            'hybrid': session.hybrid('M*-M*E', **EXPERTS),
        }.items():
            (root / name).mkdir()
            module = getattr(model[0], 'module', model[0])
            dist_checkpointing.save(
                {
                    'model': module.sharded_state_dict(),
                    'iteration': 7,
                    'args': argparse.Namespace(
                        tensor_model_parallel_size=2,
                        pipeline_model_parallel_size=4,
                        virtual_pipeline_model_parallel_size=None,
                        world_size=16,
                    ),
                },
                str(root / name),
            )
    (root / 'gpt' / TRACKER).write_text('2\n')
    return root


def save_plain(chunks, path):
    """With an optimizer that isn't distributed, as ``megatron.training`` saves it."""
    config = session.distributed_optimizer(use_distributed_optimizer=False)
    run = session.Training.start(chunks, config)
    run.train(1)
    path.mkdir()
    metadata = {'singleton_local_shards': False, 'chained_optim_avoid_prefix': True}
    dist_checkpointing.save(run.state_dict(metadata), str(path), content_metadata=metadata)


def use(summary, name):
    (found,) = [item for item in summary.uses if item.name == name]
    return found.works, found.reason


def sizes(tensors):
    """Tensors and bytes by dtype, counted on the tensors themselves."""
    found = {}
    for tensor in tensors:
        count, size = found.get(str(tensor.dtype), (0, 0))
        found[str(tensor.dtype)] = count + 1, size + tensor.numel() * tensor.element_size()
    return found


def stated(amounts):
    return {f'torch.{name}': (amount.tensors, amount.bytes) for name, amount in amounts.items()}


@pytest.mark.parametrize(
    'name', ['gpt', 'gpt/iter_0000001', 'buckets', 'plain', 'moe', 'moe run', 'mixed', 'hybrid']
)
def test_dtypes_and_bytes_are_those_of_the_tensors(real, name):
    summary = inspect_checkpoint(real / name)
    tensors = read_tensors(str(summary.directory))
    training = {key for key in tensors if key.startswith(('optimizer', 'chained'))}
    assert stated(summary.weights) == sizes(
        tensor for key, tensor in tensors.items() if key not in training
    )
    assert stated(summary.optimizer.amounts) == sizes(tensors[key] for key in training)
    files = [path for path in summary.directory.iterdir() if path.is_file()]
    assert (summary.files, summary.file_bytes) == (
        len(files),
        sum(len(path.read_bytes()) for path in files),
    )
    assert json.loads(json.dumps(summary.as_json()))['format'] == 'torch_dist'
    assert str(summary).count('\n') == 15


def test_gpt_with_optimizer(real):
    summary = inspect_checkpoint(real / 'gpt')
    assert summary.directory == real / 'gpt/iter_0000002'
    assert (summary.format, summary.iteration, summary.manifest_files) == ('torch_dist', 2, None)
    model = summary.model
    assert (model.family, model.layers, model.stored_by) == ('gpt', 2, 'axis')
    assert (model.dense, model.moe, model.pattern) == (2, 0, None)
    assert summary.weights.keys() == {'bfloat16'}
    assert (summary.optimizer.format, summary.optimizer.steps) == ('fully_reshardable', [2])
    assert summary.parallel == {} and 'no arguments are stored' in str(summary)
    assert use(summary, uses.MERGE)[0] and '--model-only' in use(summary, uses.MERGE)[1]
    assert use(summary, uses.CONVERTER) == (
        False,
        'not needed: torch_dist loads into any pipeline layout as it is',
    )
    assert use(summary, uses.INTEROP) == (
        True,
        "patterns with 2 '*' and 2 '-'; optimizer state too",
    )
    assert use(summary, uses.RESUME)[0]


def test_optimizer_formats(real):
    summary = inspect_checkpoint(real / 'buckets')
    assert summary.optimizer.format == 'dp_reshardable'
    assert use(summary, uses.INTEROP)[1].endswith('(dp_reshardable) is not stored by parameter')
    assert 'only the data-parallel size may change' in use(summary, uses.RESUME)[1]
    summary = inspect_checkpoint(real / 'plain')
    assert summary.optimizer.format == 'plain'
    assert use(summary, uses.INTEROP)[1].endswith('(plain) is not stored by parameter')


def test_experts_and_a_model_alone(real):
    summary = inspect_checkpoint(real / 'moe')
    assert (summary.model.stored_by, summary.model.dense, summary.model.moe) == ('axis', 0, 2)
    assert summary.weights.keys() == {'bfloat16', 'float32'}
    assert (summary.optimizer.format, summary.iteration) == ('none', 7)
    assert summary.parallel == {'TP': 2, 'PP': 4, 'ranks': 16}
    assert use(summary, uses.MERGE) == (True, '')
    assert '--no-load-optim' in use(summary, uses.INTEROP)[1]
    assert use(summary, uses.RESUME) == (False, 'no optimizer state; load with --no-load-optim')
    optimizer = inspect_checkpoint(real / 'moe run').optimizer
    assert (optimizer.format, optimizer.steps) == ('fully_reshardable', [1])
    mixed = inspect_checkpoint(real / 'mixed')
    assert (mixed.model.stored_by, mixed.model.dense, mixed.model.moe) == ('index', 1, 1)
    assert "2 '*', 1 '-' and 1 'E', the MLPs in the order -E" in use(mixed, uses.INTEROP)[1]


def test_hybrid(real):
    summary = inspect_checkpoint(real / 'hybrid')
    assert (summary.model.family, summary.model.pattern) == ('hybrid', 'M*-M*E')
    taken, reason = use(summary, uses.REVERSE)
    assert not taken and "layer 0, 'M'" in reason


def test_common_state_forms(tmp_path):
    directory = write_checkpoint(tmp_path / 'iter_0000003', model_tensors(3))
    for form, expected in (
        ('legacy', 'common.pt'),
        ('embedded', 'common_state/shard_0_1'),
        (None, 'none'),
    ):
        set_common_form(directory, {'iteration': 5}, form)
        summary = inspect_checkpoint(directory)
        assert (summary.common_state, summary.iteration) == (expected, 3 if form is None else 5)


def test_manifest(real, tmp_path):
    out = merge([real / 'moe'], [1.0], tmp_path / 'out', save_integrity=True).output_dir
    summary = inspect_checkpoint(out)
    assert summary.manifest_files == summary.files - 1
    (out / 'common.pt').rename(tmp_path / 'common.pt')
    with pytest.raises(CheckpointError, match='common.pt: no such file, but integrity.json names'):
        inspect_checkpoint(out)


def test_fsdp_dtensor_is_named(tmp_path):
    layers = {
        f'decoder.layers.{i}.{name}': torch.ones(4)
        for i in range(3)
        for name in ('self_attention.linear_qkv.weight', 'mlp.linear_fc1.weight')
    }
    model = {f'module.module.{key}': value for key, value in layers.items()}
    state = {key: {'exp_avg': torch.ones(4)} for key in model}
    dcp.save(
        {'model': model, 'optimizer': {'state': state}},
        storage_writer=dcp.FileSystemWriter(tmp_path / 'iter_0000009'),
        no_dist=True,
    )
    summary = inspect_checkpoint(tmp_path / 'iter_0000009')
    assert (summary.format, summary.optimizer.format) == ('fsdp_dtensor', 'fsdp_dtensor')
    assert (summary.model.family, summary.model.layers, summary.iteration) == ('gpt', 3, 9)
    assert use(summary, uses.INTEROP)[0] and '0.19' in use(summary, uses.INTEROP)[1]
    assert not use(summary, uses.MERGE)[0] and 'fsdp_dtensor' in use(summary, uses.MERGE)[1]


def test_legacy_with_virtual_stages(vpp, tmp_path):
    summary = inspect_checkpoint(vpp)
    assert (summary.format, summary.iteration) == ('torch', 2)
    assert (summary.model.family, summary.model.layers, summary.model.dense) == ('gpt', 4, 4)
    assert summary.parallel == {'TP': 1, 'PP': 2, 'VPP': 2, 'CP': 1, 'DP': 1, 'ranks': 2}
    states = [torch.load(path) for path in sorted(vpp.glob('iter_*/mp_rank_*/*.pt'))]
    assert stated(summary.weights) == sizes(
        value
        for state in states
        for key in ('model0', 'model1')
        for value in state[key].values()
        if isinstance(value, torch.Tensor)
    )
    assert summary.optimizer.format == 'in rank files' and summary.optimizer.amounts
    assert use(summary, uses.CONVERTER) == (True, 'split, reshape')
    assert use(summary, uses.RESUME) == (True, 'with the same TP, PP, VPP and EP')
    assert not use(summary, uses.MERGE)[0] and not use(summary, uses.INTEROP)[0]
    renamed = tmp_path / 'a copy'
    shutil.copytree(summary.directory, renamed)
    assert use(inspect_checkpoint(renamed), uses.CONVERTER)[0]
    (renamed / 'mp_rank_00_001/distrib_optim.pt').touch()
    assert '--drop-optimizer' in use(inspect_checkpoint(renamed), uses.CONVERTER)[1]
    shutil.rmtree(renamed / 'mp_rank_00_001')
    half = inspect_checkpoint(renamed)
    assert not use(half, uses.CONVERTER)[0]
    assert 'pipeline stage 1 is missing' in use(half, uses.CONVERTER)[1]
    assert 'edge/cloud' in use(half, uses.CONVERTER)[1]


@pytest.mark.parametrize('drop', [[], ['--drop-optimizer']])
def test_converter_agrees(vpp, tmp_path, drop):
    """What the inspector says of an optimizer state that can't be told apart is what happens."""
    root = tmp_path / 'source'
    shutil.copytree(vpp, root)
    path = next(root.glob('iter_*/mp_rank_00_001')) / 'model_optim_rng.pt'
    state = torch.load(path)
    state['optimizer'] = {'unknown': 1}
    torch.save(state, path)
    works, reason = use(inspect_checkpoint(root), uses.CONVERTER)
    assert works and reason.startswith('with --drop-optimizer: ')
    words = ['split', '--load-dir', str(root), '--save-dir', str(tmp_path / 'out'), '--dry-run']
    assert convert([*words, *drop]) == (0 if drop else 1)


@pytest.mark.parametrize(
    'change, reason',
    [
        (exchange('00_001', '00_002'), 'the directories are exchanged'),
        (exchange('00_002', '00_003'), 'the stages are not in model order'),
        (edit(put(5, 'args', 'seed'), '00_001'), 'the files are of different runs'),
        (edit(narrow('linear_fc1.weight'), '00_002'), 'the files are of different models'),
        (edit(pop('optimizer'), '00_002'), 'with --drop-optimizer: '),
    ],
)
def test_converter_agrees_on_what_belongs_together(pp4, tmp_path, change, reason, capsys):
    root = shutil.copytree(pp4, tmp_path / 'source')
    change(root)
    works, said = use(inspect_checkpoint(root), uses.CONVERTER)
    assert reason in said and works == ('--drop' in reason)
    words = ['merge', '--load-dir', str(root), '--save-dir', str(tmp_path / 'out')]
    assert convert([*words, '--pipeline-size', '2', '--dry-run']) == 1
    if not works:
        dropped = convert([*words, '--pipeline-size', '2', '--dry-run', '--drop-optimizer'])
        error = capsys.readouterr().err.splitlines()[-1].removeprefix('error: ')
        assert dropped == 1 and error == said


def pair(tmp_path, change=lambda model: None, dtype=torch.bfloat16, **options):
    first = write_checkpoint(tmp_path / 'iter_0000001', model_tensors(1))
    model = model_tensors(2, dtype)
    change(model)
    return first, write_checkpoint(tmp_path / 'iter_0000002', model, **options)


PAIRS = {
    'same': ({}, True, []),
    'layout': ({'layout': {}}, True, ['--allow-reshard']),
    'dtype': ({'dtype': torch.float32}, True, ['--merge-save-dtype DTYPE']),
    'layout and dtype': (
        {'layout': {}, 'dtype': torch.float32},
        True,
        ['--allow-reshard', '--merge-save-dtype DTYPE'],
    ),
    'keys': ({'change': lambda m: m.update({'decoder.a': m.pop(QKV)})}, False, []),
    'shape': ({'change': lambda m: m.update({QKV: m[QKV][:, :36]})}, False, []),
    'shape and layout': (
        {'change': lambda m: m.update({QKV: m[QKV][:, :36]}), 'layout': {}},
        False,
        [],
    ),
    '_extra_state': ({'extra_states': {'decoder.x._extra_state': b'1'}}, False, []),
    'integers': ({'change': lambda m: m.update({QKV: m[QKV].int()})}, False, []),
    'not of the model': ({'change': lambda m: m.update({'vision.a': torch.ones(2)})}, False, []),
}
FLAGS = {
    '--model-only': {'model_only': True},
    '--allow-reshard': {'allow_reshard': True},
    '--merge-save-dtype DTYPE': {'save_dtype': 'float32'},
}


def merges(checkpoints, options, tmp_path):
    """What the merge does: None, or its error."""
    flags = {key: value for option in options for key, value in FLAGS[option].items()}
    try:
        merge(checkpoints, [0.5, 0.5], tmp_path / 'out', dry_run=True, **flags)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize('name', PAIRS)
def test_the_verdict_is_what_the_merge_does(name, tmp_path, capsys):
    arguments, mergeable, options = PAIRS[name]
    checkpoints = pair(tmp_path, **arguments)
    found = compare_checkpoints(*checkpoints)
    assert (found.mergeable, sorted(found.options)) == (mergeable, options)
    error = merges(checkpoints, found.options if mergeable else FLAGS, tmp_path)
    assert (error is None) == mergeable
    for option in options:  # none of them is asked for in vain
        assert merges(checkpoints, set(options) - {option}, tmp_path) is not None
    if found.faults:
        assert merges(checkpoints, [], tmp_path) == found.faults[0]
    elif found.differences:
        refusal = merges(checkpoints, [], tmp_path)
        assert refusal.endswith(f'against {checkpoints[0]}: {found.differences[0]}')
    assert main(['--diff', *map(str, checkpoints)]) == int(not mergeable)
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith('mergeable' if mergeable else 'not mergeable')
    assert main(['--json', '--diff', *map(str, checkpoints)]) == int(not mergeable)
    assert json.loads(capsys.readouterr().out)['options'] == found.options


def test_every_difference_is_listed_in_few_lines(tmp_path, capsys):
    def change(model):
        model[QKV] = model[QKV][:, :36]
        for i in range(300):
            model[f'decoder.b{i}'] = torch.ones(2, dtype=torch.float32 if i % 2 else torch.float16)

    first, other = pair(tmp_path, change, torch.float32, layout={})
    model = model_tensors(3)
    change(model)
    third = write_checkpoint(
        tmp_path / 'third',
        {key: value.double() for key, value in model.items()},
        layout={'decoder.b5': (0, 2)},
    )
    groups = compare_checkpoints(first, other).groups()
    assert sorted(group[0].kind for group in groups) == [
        'chunk layout',
        'dtype',
        'global shape',
        'tensors differ:',
    ]
    assert main(['--diff', str(other), str(third)]) == 0
    out = capsys.readouterr().out
    assert 'dtype of 306 tensors, B against A, --merge-save-dtype DTYPE merges them' in out
    assert 'and 302 more' in out and out.count('\n') < 20


def test_checkpoints_of_a_run_and_of_different_models(real, tmp_path):
    checkpoints = real / 'gpt/iter_0000001', real / 'gpt/iter_0000002'
    found = compare_checkpoints(*checkpoints)
    assert found.mergeable and found.options == ['--model-only'] and not found.differences
    assert merges(checkpoints, [], tmp_path) and not merges(checkpoints, found.options, tmp_path)
    found = compare_checkpoints(real / 'moe', real / 'hybrid')
    assert not found.mergeable and merges([real / 'moe', real / 'hybrid'], FLAGS, tmp_path)
    (tmp_path / 'link').symlink_to(real / 'gpt')
    for same in (real / 'gpt', real / 'gpt/iter_0000002', tmp_path / 'link'):
        with pytest.raises(CheckpointError, match='the same checkpoint as .*gpt; name two'):
            compare_checkpoints(real / 'gpt', same)


class Touches:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def copy(real, tmp_path):
    shutil.copytree(real / 'moe', tmp_path / 'iter_0000007')
    return tmp_path / 'iter_0000007'


def one_line(capsys, *paths):
    """The only line that is printed, on standard error."""
    assert main([str(path) for path in paths]) == 1
    out, error = capsys.readouterr()
    assert out == '' and error.count('\n') == 1, (out, error)
    return error


@pytest.mark.parametrize('place', ['.metadata', 'common.pt', 'embedded', 'rank file', 'args'])
def test_nothing_in_a_checkpoint_is_run(place, copy, vpp, tmp_path, capsys):
    touched = tmp_path / 'touched'
    hostile = Touches(touched)
    if place == '.metadata':
        (copy / place).write_bytes(pickle.dumps(hostile))
    elif place == 'rank file':
        copy = tmp_path / 'vpp'
        shutil.copytree(vpp, copy)
        path = next(copy.glob('iter_*/mp_rank_00_001')) / 'model_optim_rng.pt'
        torch.save(torch.load(path) | {'x': hostile}, path)
    else:
        state = {'iteration': 7, 'x': hostile}
        if place == 'args':
            state = {'iteration': 7, 'args': argparse.Namespace(x=hostile)}
        set_common_form(copy, state, 'embedded' if place == 'embedded' else 'legacy')
    error = one_line(capsys, copy)
    assert 'refused class posix.mkdir' in error and '--trust-checkpoints' not in error
    assert not touched.exists()


def damaged(change):
    def apply(directory):
        metadata = dcp.FileSystemReader(directory).read_metadata()
        change(metadata)
        (directory / '.metadata').write_bytes(pickle.dumps(metadata))

    return apply


def set_path(metadata, path):
    info = next(iter(metadata.storage_data.values()))
    object.__setattr__(info, 'relative_path', path)


def first_tensor(metadata):
    return next(
        entry for entry in metadata.state_dict_metadata.values() if hasattr(entry, 'properties')
    )


def cut(name):
    def apply(directory):
        (path,) = sorted(directory.glob(name))[:1]
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return apply


FAULTS = {
    'data cut short': (cut('*.distcp'), 'truncated'),
    'data missing': (lambda d: sorted(d.glob('*.distcp'))[0].unlink(), 'No such file'),
    'metadata cut short': (cut('.metadata'), 'truncated or damaged'),
    'metadata empty': (lambda d: (d / '.metadata').write_bytes(b''), 'truncated or damaged'),
    'metadata missing': (lambda d: (d / '.metadata').unlink(), 'was not finished'),
    'unfinished': (lambda d: (d / 'metadata.json').unlink(), 'unfinished'),
    'format missing': (lambda d: (d / 'metadata.json').write_text('[1]'), 'expected'),
    'another format': (
        lambda d: (d / 'metadata.json').write_text('{"sharded_backend": "zarr"}'),
        "'zarr', expected 'torch_dist'",
    ),
    'common.pt damaged': (lambda d: (d / 'common.pt').write_bytes(b'PK'), 'common.pt'),
    'common.pt a list': (lambda d: torch.save([1, 2], d / 'common.pt'), 'list, expected a dict'),
    'common.pt a directory': (lambda d: (d / 'common.pt').mkdir(), 'common.pt'),
    'file outside': (damaged(lambda m: set_path(m, '../secret')), 'outside the checkpoint'),
    'file of another type': (damaged(lambda m: set_path(m, 7)), 'damaged (storage of '),
    'no dtype': (
        damaged(lambda m: setattr(first_tensor(m).properties, 'dtype', 'x')),
        'damaged (entry ',
    ),
    'no size': (damaged(lambda m: setattr(first_tensor(m), 'size', None)), 'damaged (entry '),
    'manifest damaged': (lambda d: (d / 'integrity.json').write_text('x'), 'no integrity manifest'),
}


@pytest.mark.parametrize('name', FAULTS)
def test_faults_are_one_line(name, copy, capsys):
    change, message = FAULTS[name]
    if 'common.pt' in name:
        (copy / 'common.pt').unlink(missing_ok=True)
    change(copy)
    assert message in one_line(capsys, copy)
    (copy.parent / TRACKER).write_text('7')
    assert message in one_line(capsys, copy.parent)


def test_legacy_faults_are_one_line(vpp, tmp_path, capsys):
    copy = tmp_path / 'iter_0000002'
    rank = copy / 'mp_rank_00_001/model_optim_rng.pt'
    shutil.copytree(next(vpp.glob('iter_*')), copy)
    whole = rank.read_bytes()
    for content, message in (
        (whole[: len(whole) // 2], 'truncated or damaged'),
        (b'', 'truncated or damaged'),
    ):
        rank.write_bytes(content)
        assert message in one_line(capsys, copy)
    for state, message in (
        ([1], 'holds list'),
        ({'iteration': 2}, 'key `model` is missing'),
        ({'model0': {1: torch.ones(1)}}, 'expected names of parameters'),
        ({'model0': [1]}, 'holds list'),
    ):
        torch.save(state, rank)
        assert message in one_line(capsys, copy)
    rank.unlink()
    assert 'no model_optim_rng.pt' in one_line(capsys, copy)
    rank.parent.rename(copy / 'mp_rank_x')
    assert 'not a rank directory' in one_line(capsys, copy)


def test_paths_that_are_no_checkpoint(tmp_path, capsys):
    assert "doesn't exist" in one_line(capsys, tmp_path / 'absent')
    (tmp_path / 'file').touch()
    assert 'is a file' in one_line(capsys, tmp_path / 'file')
    (tmp_path / 'empty').mkdir()
    assert 'not a checkpoint' in one_line(capsys, tmp_path / 'empty')
    (tmp_path / 'root/iter_0000001').mkdir(parents=True)
    assert 'name one of its iter_*' in one_line(capsys, tmp_path / 'root')
    (tmp_path / 'root' / TRACKER).write_text('3')
    assert 'names 3, but' in one_line(capsys, tmp_path / 'root')
    (tmp_path / 'root' / TRACKER).write_text('x')
    assert "holds 'x'" in one_line(capsys, tmp_path / 'root')
    assert 'File name too long' in one_line(capsys, 'x' * 5000)
    assert "doesn't exist" in one_line(capsys, '--diff', tmp_path / 'absent', tmp_path)


def test_unreadable_files(copy, capsys, monkeypatch):
    read_bytes = Path.read_bytes

    def refusing(path):
        if path.name == '.metadata':
            raise PermissionError(13, 'Permission denied', str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, 'read_bytes', refusing)
    assert "can't be read: Permission denied" in one_line(capsys, copy)

    def closed(path):
        raise PermissionError(13, 'Permission denied', str(path))

    monkeypatch.setattr(Path, 'iterdir', closed)
    assert f'{copy}: Permission denied' in one_line(capsys, copy)


@pytest.mark.parametrize('name', ['a b', 'a\nb', 'Größe 模型', 'a:b', b'a\xff', '-x'])
def test_odd_names(name, copy, capsys):
    odd = copy.parent / os.fsdecode(name)
    shutil.copytree(copy, odd)
    assert main([str(odd)]) == 0
    out = capsys.readouterr().out
    out.encode()
    assert out.count('\n') == 16
    if name in ('a b', 'Größe 模型'):
        assert out.splitlines()[0] == str(odd)
    assert main(['--json', str(odd)]) == 0
    assert json.loads(capsys.readouterr().out)['directory'] == str(odd)
    (odd / 'metadata.json').unlink()
    assert 'unfinished' in one_line(capsys, odd)
    assert main(['--diff', str(copy), str(odd)]) == 1


def test_output_that_can_not_be_shown(copy, capsys, monkeypatch):
    with open('/dev/full', 'w') as full:
        monkeypatch.setattr(sys, 'stdout', full)
        error = one_line(capsys, copy)
    assert error == "error: standard output can't be written: No space left on device\n"


def test_wrong_usage(capsys):
    for words in ([], ['a', '--diff', 'b', 'c'], ['--diff', 'a']):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
    capsys.readouterr()


def test_as_a_script(copy, tmp_path):
    """In a process that hasn't loaded megatron, from anywhere; --help without loading torch."""
    script = REPOSITORY / 'tools/checkpoint/inspect_checkpoint.py'

    def python(*words, **variables):
        return subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            env=os.environ | variables,
        )

    done = python(script, copy.name)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines()[1].split() == ['format', 'torch_dist']
    off = python(script, copy.name, MEGATRON_OVERLAY='0')
    assert off.returncode == 1 and off.stderr.count('\n') == 1 and 'unset it' in off.stderr
    helps = python('-X', 'importtime', script, '--help')
    assert helps.returncode == 0 and 'torch' not in helps.stderr
    assert helps.stdout.startswith('usage: inspect_checkpoint.py ')
    assert '--diff A B' in helps.stdout and 'exit status' in helps.stdout
