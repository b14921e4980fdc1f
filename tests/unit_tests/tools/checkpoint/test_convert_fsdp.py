"""Conversion of fsdp_dtensor checkpoints: damage, refusals, the command line, other commands."""

import io
import json
import pickle
import shutil
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import PARAM, parse_key
from megatron_overlay.standalone.dist_checkpointing.checkpoint_layout import layout_from_metadata
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.unit_tests.optimizer.resume_runs import launch, read_records
from tests.unit_tests.tools.checkpoint.fsdp_twins import (
    DDP,
    FSDP,
    LEFT_OUT,
    SEVERAL_CONNECTIONS,
    fsdp_differences,
    make_fsdp_twins,
)
from tests.unit_tests.tools.checkpoint.handmade import tree
from tests.unit_tests.tools.checkpoint.optimizer_twins import differences, read_all, same
from tests.unit_tests.tools.checkpoint.test_convert_optimizer import (
    KILLED,
    REPOSITORY,
    change_common_state,
    flip_bit,
    refused,
    set_argument,
)
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.convert_ckpt_optimizer import convert_optimizer, main
from tools.checkpoint.inspect_checkpoint import inspect_checkpoint
from tools.checkpoint.optimizer_layouts.fsdp_model import names_of_model

STATE = 'optimizer.state.module.module.module.'
META = 'optimizer.param_to_group_meta.module.module.module.'
FC1 = 'decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight'


@pytest.fixture(scope='module')
def twins(tmp_path_factory):
    """Experts, gated, bf16, on one rank."""
    directory = tmp_path_factory.mktemp('twins')
    return make_fsdp_twins(directory, 1, '--bf16', '--swiglu', '--num-experts', '4')


@pytest.fixture
def source(twins, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(twins.fsdp, tmp_path / 'source'))


def edit(root: Path, change) -> None:
    """Change the metadata of the checkpoint."""
    directory = root / 'iter_0000003'
    metadata = FileSystemReader(directory).read_metadata()
    change(metadata)
    (directory / '.metadata').write_bytes(pickle.dumps(metadata))


def rename(root: Path, old: str, new: str | None) -> None:
    """Give entries whose key begins so another key, or leave them out."""

    def change(metadata):
        for key in [key for key in metadata.state_dict_metadata if key.startswith(old)]:
            entry = metadata.state_dict_metadata.pop(key)
            indices = [index for index in metadata.storage_data if index.fqn == key]
            places = [metadata.storage_data.pop(index) for index in indices]
            if new is not None:
                own = new + key.removeprefix(old)
                metadata.state_dict_metadata[own] = entry
                for index, place in zip(indices, places, strict=True):
                    metadata.storage_data[MetadataIndex(own, index.offset)] = place

    edit(root, change)


def test_stacked_experts_are_those_of_the_twin(twins, tmp_path):
    convert_optimizer(twins.fsdp, tmp_path / 'out')
    assert differences(tmp_path / 'out', twins.torch_dist) == LEFT_OUT


@pytest.mark.parametrize(
    ('missing', 'told'),
    [
        (f'model.module.{FC1}_v', f'state or settings of {FC1}_v'),
        ('model.module.decoder.final_layernorm.weight', 'decoder.final_layernorm.weight'),
        (f'{STATE}{FC1}_w.exp_avg_sq', f'no exp_avg_sq of {FC1}_w'),
        (f'{STATE}{FC1}_w', f'no optimizer state of {FC1}_w'),
        (f'{META}{FC1}.', f'no param_to_group_meta of {FC1}_'),
        ('args', 'no saved arguments'),
        ('rng_state.(0, 0).0.random_rng_state', 'no random_rng_state'),
    ],
)
def test_missing_key(source, tmp_path, missing, told):
    rename(source, missing, None)
    refused(source, tmp_path, told)


def test_a_whole_parameter_is_missing(source, tmp_path):
    for prefix in ('model.module.', STATE, META):
        rename(source, f'{prefix}{FC1}', None)
    refused(source, tmp_path, f'no model.module.{FC1}_w', 'experts.experts.linear_fc1.weight')


@pytest.mark.parametrize(
    ('old', 'new', 'told'),
    [
        (f'{FC1}_w', f'{FC1}_x', 'not known as a parameter'),
        (f'{FC1}_w', FC1, 'not known as a parameter'),
        (FC1, FC1.replace('local_experts.2', 'local_experts.7'), '4 experts, of which it'),
        (FC1, 'decoder.layers.1.mlp.experts.linear_fc1.weight3', 'the same part of'),
        (FC1, FC1.replace('layers.1', 'layers.2'), '3 layers are stored, args.num_layers is 2'),
        ('decoder.final_layernorm', 'decoder.final_norm', 'of a hybrid model'),
        ('embedding.word', 'embedding.sentence', 'not known as a parameter'),
    ],
)
def test_another_name(source, tmp_path, old, new, told):
    for prefix in ('model.module.', STATE, META):
        rename(source, prefix + old, prefix + new)
    refused(source, tmp_path, told)


def test_an_entry_that_is_not_known(source, tmp_path):
    rename(source, 'checkpoint_version', 'sampler.state')
    refused(source, tmp_path, 'sampler.state', 'not known here')


def test_stored_under_two_prefixes(source, tmp_path):
    rename(source, f'model.module.{FC1}_w', f'model.module.module.{FC1}_v')
    refused(source, tmp_path, f'{FC1}_v is stored under several prefixes')


@pytest.mark.parametrize('of', [f'model.module.{FC1}_w', f'{STATE}{FC1}_w.exp_avg'])
def test_wrong_shape(source, tmp_path, of):
    def shorten(metadata):
        entry = metadata.state_dict_metadata[of]
        entry.size = torch.Size([entry.size[0] // 2, *entry.size[1:]])
        entry.chunks[0].__dict__['sizes'] = tuple(entry.size)

    edit(source, shorten)
    refused(source, tmp_path, f'{FC1}_w', 'is [')


def test_halves_that_arguments_do_not_know(source, tmp_path):
    set_arguments(source, swiglu=False)
    refused(source, tmp_path, 'no --swiglu', 'not known as a parameter')


@pytest.mark.parametrize(
    ('name', 'value', 'told'),
    [
        ('num_layers', 4, '2 layers are stored, args.num_layers is 4'),
        ('multi_latent_attention', True, 'are those of other attention'),
        ('mla_down_proj_fusion', True, 'a fused down projection'),
        ('mtp_num_layers', 1, '0 depths of multi-token prediction'),
        ('spec', ['my.specs', 'layer'], 'a layer spec of its own'),
        ('transformer_impl', 'inference_optimized', 'expected local or transformer_engine'),
        ('num_experts', 5, 'no model.module.decoder.layers.0.mlp.experts.local_experts.4.'),
        ('num_experts', None, '0 experts, of which it is none'),
    ],
)
def test_models_that_are_not_known(source, tmp_path, name, value, told):
    set_arguments(source, **{name: value})
    refused(source, tmp_path, told)


def set_arguments(root: Path, **changed) -> None:
    args = read_object_of(root, 'args')
    vars(args).update(changed)
    put_object(root, 'args', args)


def read_object_of(root: Path, key: str):
    directory = root / 'iter_0000003'
    place = FileSystemReader(directory).read_metadata().storage_data[MetadataIndex(key)]
    content = (directory / place.relative_path).read_bytes()[place.offset :][: place.length]
    return torch.load(io.BytesIO(content), weights_only=False)


def put_object(root: Path, key: str, value) -> None:
    """Store another object under a key, in a file of its own."""
    file = root / 'iter_0000003' / 'own.distcp'
    torch.save(value, file)

    def point(metadata):
        own = metadata.storage_data[MetadataIndex(key)]
        own.relative_path, own.offset, own.length = file.name, 0, file.stat().st_size

    edit(root, point)


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        (f'{META}decoder.final_layernorm.weight.wd_mult', None),
        (f'{META}decoder.final_layernorm.weight.wd_mult', 'x'),
        ('args', {'spec': torch.zeros(3)}),
        ('args', {'num_experts': 'four'}),
    ],
)
def test_settings_of_another_make(source, tmp_path, key, value):
    if key == 'args':
        set_arguments(source, **value)
    else:
        put_object(source, key, value)
    refused(source, tmp_path, 'no checkpoint that Megatron wrote, or damaged')


@pytest.mark.parametrize('to', ['torch_dist', 'fsdp_dtensor'])
def test_more_experts_than_could_be_counted(twins, tmp_path, to):
    of = twins.fsdp if to == 'torch_dist' else twins.torch_dist
    source = Path(shutil.copytree(of, tmp_path / 'source'))
    if to == 'torch_dist':
        set_arguments(source, num_experts=2**40)
    else:
        set_argument(source, 'num_experts', 2**40)
    with pytest.raises(CheckpointError, match=r'local_experts\.4\.|expected \[2, 1099511627776\]'):
        convert_optimizer(source, tmp_path / 'out', to=to)


def test_experts_with_settings_of_their_own(twins, tmp_path):
    """Megatron-FSDP has no group for them, so that they have to be those of the others."""
    source = Path(shutil.copytree(twins.torch_dist, tmp_path / 'source'))

    def give_experts_a_group(state):
        groups = state['optimizer']['optimizer']['param_groups']
        groups.append({**groups[0], 'is_expert_parallel': True, 'max_lr': 1.0})

    change_common_state(source, give_experts_a_group)
    with pytest.raises(CheckpointError, match='max_lr of experts and of others differ'):
        convert_optimizer(source, tmp_path / 'out', to='fsdp_dtensor')
    assert not (tmp_path / 'out').exists()

    def in_another_order(state):
        groups = state['optimizer']['optimizer']['param_groups']
        same = {**groups[0], 'is_expert_parallel': True}
        groups[-1] = dict(reversed(same.items()))

    change_common_state(source, in_another_order)
    convert_optimizer(source, tmp_path / 'out', to='fsdp_dtensor')
    found = fsdp_differences(tmp_path / 'out', twins.fsdp)
    assert [key for key in found if 'rng_state' not in key] == ['args']


def test_a_depth_lacks_a_weight(tmp_path):
    """Of multi-token prediction: its layers aren't stacked, so that no shape tells."""
    keys = [f'mtp.layers.{depth}.{part}.weight' for depth in (0, 1) for part in ('enorm', 'hnorm')]
    keys += ['decoder.final_layernorm.weight', 'decoder.layers.0.mlp.linear_fc1.weight']
    args = Namespace(num_layers=1, mtp_num_layers=2, transformer_impl='local')
    for names in (keys, [key for key in keys if key != 'mtp.layers.1.hnorm.weight']):
        entry = TensorStorageMetadata(TensorProperties(), torch.Size([4]), [])
        metadata = Metadata({f'model.module.{name}': entry for name in names})
        layout = layout_from_metadata(metadata)
        if names == keys:
            assert names_of_model(args, layout, tmp_path).layers == 1
        else:
            with pytest.raises(CheckpointError, match=r'no mtp\.layers\.1\.hnorm\.weight, which'):
                names_of_model(args, layout, tmp_path)


@pytest.mark.parametrize(
    ('kind', 'layers'), [('gpt', ['--swiglu']), ('hybrid', ['--hybrid-layer-pattern', 'M*|-M'])]
)
def test_pipeline_stages_go_there_and_back(tmp_path, kind, layers):
    """Megatron-FSDP has none, and numbers layers through."""
    root = tmp_path / 'stages'
    arguments = ['--bf16', *layers, *DDP, '--pipeline-model-parallel-size', '2']
    task = {
        'name': 'stages',
        'kind': kind,
        'arguments': [*arguments, '--train-iters', '3', '--save', str(root)],
        'result': str(tmp_path / 'record'),
    }
    launch(2, [task], tmp_path / 'tasks.json')
    read_records(tmp_path / 'record')
    convert_optimizer(root, tmp_path / 'fsdp', to='fsdp_dtensor')
    convert_optimizer(tmp_path / 'fsdp', tmp_path / 'back')
    assert differences(tmp_path / 'back', root) == LEFT_OUT


@pytest.mark.parametrize('part', ['decoder.final_layernorm.', 'embedding.'])
def test_frozen_parameters(twins, source, tmp_path, part):
    """They have neither state nor settings, and stay so in both directions."""
    for prefix in (STATE, META):
        rename(source, f'{prefix}{part}', None)
    result = convert_optimizer(source, tmp_path / 'out', verify=True)
    assert result.without_state and all(name.startswith(part) for name in result.without_state)
    found = differences(tmp_path / 'out', twins.torch_dist)
    assert {name.rpartition(part)[0] for name in found if part in name} == {
        '',  # the weight itself, in the dtype that it was stored in
        *(f'only one has optimizer.state.{state}.' for state in ('param', 'exp_avg', 'exp_avg_sq')),
    }
    assert [name for name in found if part not in name] == LEFT_OUT
    convert_optimizer(tmp_path / 'out', tmp_path / 'back', to='fsdp_dtensor')
    found = fsdp_differences(tmp_path / 'back', source)
    assert [name for name in found if 'rng_state' not in name] == []


def test_a_run_that_made_no_step(twins, source, tmp_path):
    """With fp16 the first steps are skipped until the loss scale fits: settings, and no state."""
    rename(source, STATE, None)
    result = convert_optimizer(source, tmp_path / 'out')
    assert result.warnings[0].startswith('no optimizer state')
    tensors, common = read_all(tmp_path / 'out')
    assert not any(key.startswith('optimizer') for key in tensors) and 'optimizer' not in common


def test_the_loss_scale_is_told_of(source, tmp_path):
    set_arguments(source, bf16=False, fp16=True)
    (warning,) = convert_optimizer(source, tmp_path / 'out').warnings
    assert 'does not store the loss scale' in warning
    (_, warning) = convert_optimizer(
        tmp_path / 'out', tmp_path / 'back', to='fsdp_dtensor'
    ).warnings
    assert 'does not load a loss scale' in warning


@pytest.mark.parametrize('to', ['torch_dist', 'fsdp_dtensor'])
def test_killed_and_run_again(twins, tmp_path, to):
    source = twins.fsdp if to == 'torch_dist' else twins.torch_dist
    out = tmp_path / 'out'
    program = KILLED.replace('sys.argv[2])', f"sys.argv[2], to='{to}')")
    command = [sys.executable, '-c', program, str(source), str(out), 'synced']
    killed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    assert not (out / 'iter_0000003').exists()
    convert_optimizer(source, out, to=to)
    assert sorted(path.name for path in out.iterdir()) == [
        'iter_0000003',
        'latest_checkpointed_iteration.txt',
    ]


def test_a_weight_that_is_not_its_main_parameter(twins, tmp_path):
    source = Path(shutil.copytree(twins.torch_dist, tmp_path / 'source'))
    key = 'decoder.layers.self_attention.linear_qkv.weight'
    flip_bit(source, MetadataIndex(key, torch.Size([0, 0, 0])), 0)
    before = tree(source)
    with pytest.raises(CheckpointError, match=f'taken for {key}'):
        convert_optimizer(source, tmp_path / 'out', to='fsdp_dtensor')
    assert not (tmp_path / 'out').exists() and tree(source) == before


def test_without_optimizer_state(twins, source, tmp_path):
    """Weights are the main parameters, as they are stored; and back."""
    convert_optimizer(twins.fsdp, tmp_path / 'whole')
    for prefix in (STATE, META):
        rename(source, prefix, None)
    convert_optimizer(source, tmp_path / 'out', verify=True)
    whole, found = (read_all(tmp_path / name)[0] for name in ('whole', 'out'))
    main = {parse_key(key).name: whole[key] for key in whole if parse_key(key).state == PARAM}
    assert found.keys() == main.keys() and all(same(found[key], main[key]) for key in found)
    convert_optimizer(tmp_path / 'out', tmp_path / 'back', to='fsdp_dtensor', verify=True)
    other = [key for key in fsdp_differences(tmp_path / 'back', source) if 'rng_state' not in key]
    assert other == []


def test_command_line(twins, tmp_path, capsys):
    out, report = tmp_path / 'out', tmp_path / 'report.json'
    arguments = ['--load-dir', str(twins.fsdp), '--save-dir', str(out)]
    assert main([*arguments, '--dry-run', '--report-json', str(report)]) == 0
    assert json.loads(report.read_text())['target'] == 'fully_reshardable' and not out.exists()
    assert 'optimizer state fsdp_dtensor' in capsys.readouterr().out
    assert main([*arguments, '--to', 'fsdp_dtensor']) == 0
    told = capsys.readouterr().out
    assert 'fsdp_dtensor already, what Megatron-FSDP loads' in told and not out.exists()
    arguments = ['--load-dir', str(twins.torch_dist), '--save-dir', str(out)]
    assert main([*arguments, '--to', 'fsdp_dtensor', '--iteration', '3']) == 0
    told = capsys.readouterr().out
    assert 'into fsdp_dtensor' in told and '--no-load-rng' in told


def test_the_inspector_names_the_command(twins):
    summary = inspect_checkpoint(twins.fsdp)
    (reason,) = [use.reason for use in summary.uses if use.name == 'resume with optimizer']
    directory = twins.fsdp / 'iter_0000003'
    assert f'convert_ckpt_optimizer.py --load-dir {directory} --save-dir' in reason


def test_runs_of_the_other_kind_name_the_command(twins, tmp_path):
    tasks = [
        {
            'name': name,
            'kind': 'gpt',
            'arguments': [*twins.arguments, *options, '--load', str(root), '--train-iters', '4'],
            'result': str(tmp_path / name),
        }
        for name, options, root in (('ddp', DDP, twins.fsdp), ('fsdp', FSDP, twins.torch_dist))
    ]
    launch(1, tasks, tmp_path / 'tasks.json', **SEVERAL_CONNECTIONS)
    told = [('ddp', twins.fsdp, ''), ('fsdp', twins.torch_dist, ' --to fsdp_dte')]
    if version('megatron-core').startswith('0.18.'):
        told.pop()  # 0.18 takes any checkpoint for its own there, and ends with a KeyError
    for name, root, end in told:
        with pytest.raises(AssertionError) as error:
            read_records(tmp_path / name)
        command = f'convert_ckpt_optimizer.py --load-dir {root / "iter_0000003"} --save-dir {root}'
        assert command in str(error.value) and end in str(error.value)
