"""Optimizer state as megatron-core 0.10 to 0.14 stored it, in checkpoints that these wrote."""

import dataclasses
import io
import pickle
import re

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from tests.cpu_megatron import warm
from tests.cpu_megatron.recorder import read_log
from tests.cpu_megatron.whole_checkpoint import read_tensors
from tests.old_formats.make_checkpoints import CASES
from tests.old_formats.stored import digests, expected, unpack
from tools.checkpoint import inspect_checkpoint
from tools.checkpoint.convert_ckpt_optimizer import convert_optimizer, main
from tools.checkpoint.inspection.resume import describe, read_resume_report
from tools.checkpoint.inspection.weights import check_weights

CONVERTED = list(CASES)
# Relative differences of losses and norms. Sums differ in the last digits from processor to
# processor, and bf16 may round them to a neighbour; 0.12 rounds elsewhere in MoE layers.
CLOSE = dict.fromkeys(CASES, 1e-4) | {'core-0.13-pp2-fp32': 1e-6, 'core-0.12-moe-ep2': 1e-3}
ITERATION = 'iter_0000002'
MAIN = 'optimizer.state.fp32_param.'
FC1 = 'decoder.layers.mlp.linear_fc1.weight'
_STATE = re.compile(r'(?:chained_\d\.)?optimizer\.state\.([^.]+)\.(.+)')


@pytest.fixture(scope='module')
def converted(tmp_path_factory):
    """By case: the directory that was read, and the root that was written."""
    pairs = {}
    for name in CONVERTED:
        root = tmp_path_factory.mktemp(name)
        convert_optimizer(unpack(name, root / 'old'), root / 'new', verify=True)
        pairs[name] = root / 'old' / ITERATION, root / 'new'
    return pairs


def unflattened(tensor, shape):
    """Of a tensor of flattened shards, the whole: reshaped and permuted."""
    grid = tensor.shape[:-1]
    sizes = [whole // number for whole, number in zip(shape, grid, strict=True)]
    pairs = [axis for i in range(len(grid)) for axis in (i, len(grid) + i)]
    return tensor.reshape(*grid, *sizes).permute(pairs).reshape(shape)


def by_hand(tensors):
    """The optimizer state by another way, from whole tensors."""
    result = {}
    for key, tensor in tensors.items():
        match = _STATE.fullmatch(key)
        if match:
            shape = tensors[match[2]].shape
            whole = tensor if tensor.shape == shape else unflattened(tensor, shape)
            result[f'optimizer.state.{match[1].removeprefix("fp32_")}.{match[2]}'] = whole
    return result


@pytest.mark.parametrize('name', CONVERTED)
def test_equals_what_core_makes_of_it(converted, name):
    """Core 0.15, the last that loads it, saved the same state in ``fully_reshardable``."""
    made = read_tensors(str(converted[name][1] / ITERATION))
    assert digests(made) == expected(name)['optimizer']


@pytest.mark.parametrize('name', CONVERTED)
def test_equals_a_computation_from_the_tensors_of_the_file(converted, name):
    source, root = converted[name]
    old, made = read_tensors(str(source)), read_tensors(str(root / ITERATION))
    wanted = by_hand(old) | {key: old[key] for key in old if not _STATE.fullmatch(key)}
    assert wanted.keys() == made.keys()
    assert not [key for key in wanted if not torch.equal(wanted[key], made[key])]


@pytest.mark.parametrize('name', CONVERTED)
def test_all_else_is_as_it_was(converted, name):
    source, root = converted[name]
    old, made = common_state(source), common_state(root / ITERATION)
    for before, after in zip(optimizers(old), optimizers(made), strict=True):
        kept = {key: before[key] for key in before if key != 'param_state'}
        assert after == kept | {'param_state_sharding_type': 'fully_reshardable'}
    content = made['content_metadata']
    assert content['distrib_optim_sharding_type'] == 'fully_reshardable'
    assert content['chained_optim_avoid_prefix'] is True
    assert vars(old['args']) == vars(made['args'])
    changed = ('args', 'optimizer', 'content_metadata')
    rest = [{key: state[key] for key in state if key not in changed} for state in (old, made)]
    assert rest[0] == rest[1]
    before, after = stored_bytes(source), stored_bytes(root / ITERATION)
    assert before and before == after


def stored_bytes(directory):
    """Of every entry that isn't the optimizer's, as the file has it."""
    return {
        index: path.read_bytes()[offset : offset + length]
        for index in metadata(directory).storage_data
        if 'optimizer.state.' not in index.fqn
        for path, offset, length in [place(directory, index)]
    }


def common_state(directory):
    return torch.load(directory / 'common.pt', weights_only=False)


def optimizers(state):
    parts = state['optimizer']
    return list(parts.values()) if 0 in parts else [parts]


@pytest.mark.parametrize('name', CONVERTED)
def test_the_next_steps_are_those_of_the_old_core(converted, tmp_path, name):
    """Losses and gradient norms, in the layout that saved it."""
    log = resume(name, CASES[name].ranks, converted[name][1], tmp_path)
    for step, wanted in zip(log, steps(name), strict=True):
        assert step == pytest.approx(wanted, rel=CLOSE[name])


def test_the_next_steps_in_one_pipeline_stage(converted, tmp_path):
    """Instead of two: the norm's sum is in another order, which a clipped gradient shows."""
    name, layout = 'core-0.13-pp2-fp32', ['--pipeline-model-parallel-size', '1']
    log = resume(name, 1, converted[name][1], tmp_path, *layout)
    for step, wanted in zip(log, steps(name), strict=True):
        assert step == pytest.approx(wanted, rel=1e-6)


def test_a_hybrid_run_goes_on_with_the_optimizer_state(converted):
    """In two commands: conversion, and ``--load`` of the overlay."""
    name = 'core-0.14-tp2-dp2'
    options = [
        *CASES[name].resumed_with(),
        *('--tensor-model-parallel-size', '1', '--hybrid-layer-pattern', 'M*-M*-'),
        *('--exit-interval', '3', '--load', str(converted[name][1])),
    ]
    layers = options.index('--num-layers')
    del options[layers : layers + 2]
    printed = warm.run(1, 'tests.cpu_megatron.pretrain', 'hybrid', *options)
    assert 'GPT checkpoint into a hybrid model' in printed
    assert 'optimizer state is loaded' in printed


def steps(name):
    return [
        {key: float.fromhex(value) for key, value in step.items()}
        for step in expected(name)['steps'][2:]
    ]


def resume(name, ranks, load, into, *arguments):
    """Losses and gradient norms of iterations 3 and 4."""
    options = [
        *('--cpu-log', f'{into}/log', '--load', str(load), '--exit-interval', '4'),
        *('--dist-ckpt-strictness', 'raise_unexpected'),
        *CASES[name].resumed_with(),
        *arguments,
    ]
    adam = {'CPU_MEGATRON_OPTIMIZER': CASES[name].adam}
    warm.run(ranks, 'tests.cpu_megatron.pretrain', 'gpt', *options, env=adam)
    log = read_log(into / 'log')
    assert [step.pop('iteration') for step in log] == [3, 4]
    return log


@pytest.fixture
def checkpoint(tmp_path):
    """A case's iteration, to be damaged."""
    return unpack('core-0.14-tp2-dp2', tmp_path / 'old') / ITERATION


def refused(checkpoint, capsys, *words):
    """The command ends with one line that has the words, and writes nothing."""
    out = checkpoint.parents[1] / 'out'
    assert main(['--load-dir', str(checkpoint.parent), '--save-dir', str(out)]) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert 'Traceback' not in message
    assert not [word for word in words if word not in message], message
    assert not list(out.glob('*'))


def place(directory, index):
    """Where an entry is stored: file, offset, length."""
    info = metadata(directory).storage_data[index]
    return directory / info.relative_path, info.offset, info.length


def metadata(checkpoint):
    return pickle.loads((checkpoint / '.metadata').read_bytes())


def change_metadata(checkpoint, change):
    changed = metadata(checkpoint)
    change(changed)
    (checkpoint / '.metadata').write_bytes(pickle.dumps(changed))


def flip(checkpoint, key, offsets, bit):
    """Flip a bit of a chunk's fourth element."""
    path, start, length = place(checkpoint, MetadataIndex(key, torch.Size(offsets)))
    data = bytearray(path.read_bytes())
    tensor = torch.load(io.BytesIO(data[start : start + length])).flatten()
    elements = tensor.view(torch.uint8).numpy().tobytes()
    at = data.index(elements, start, start + length) + 3 * tensor.itemsize + bit // 8
    data[at] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize(
    ('key', 'offsets', 'bit'), [(MAIN + FC1, (1, 2, 0, 0), 30), (FC1, (1, 16, 0), 0)]
)
def test_a_flipped_bit_is_refused(checkpoint, capsys, key, offsets, bit):
    """In a main parameter, and the lowest one of a weight."""
    flip(checkpoint, key, offsets, bit)
    path, _, _ = place(checkpoint, MetadataIndex(key, torch.Size(offsets)))
    refused(checkpoint, capsys, str(path), MAIN + FC1, FC1)


def test_exchanged_shards_are_refused(checkpoint, capsys):
    def exchange(changed):
        gate, up = (
            MetadataIndex(MAIN + FC1, torch.Size(offsets))
            for offsets in ((0, 0, 0, 0), (0, 2, 0, 0))
        )
        data = changed.storage_data
        data[gate], data[up] = data[up], data[gate]

    change_metadata(checkpoint, exchange)
    refused(checkpoint, capsys, MAIN + FC1, 'do not belong together')


@pytest.mark.parametrize('state', ['fp32_param', 'exp_avg', 'exp_avg_sq'])
def test_a_missing_state_is_refused(checkpoint, capsys, state):
    key = f'optimizer.state.{state}.{FC1}'
    change_metadata(checkpoint, lambda changed: changed.state_dict_metadata.pop(key))
    refused(checkpoint, capsys, f'no {key}')


def test_state_of_no_weight_is_refused(checkpoint, capsys):
    change_metadata(checkpoint, lambda changed: changed.state_dict_metadata.pop(FC1))
    refused(checkpoint, capsys, f'{FC1}: there is no weight {FC1}')


def test_state_of_another_optimizer_is_refused(checkpoint, capsys):
    given, named = (f'optimizer.state.{state}.{FC1}' for state in ('exp_avg', 'momentum_buffer'))

    def rename(changed):
        changed.state_dict_metadata[named] = changed.state_dict_metadata.pop(given)
        changed.storage_data = {
            MetadataIndex(named, index.offset) if index.fqn == given else index: info
            for index, info in changed.storage_data.items()
        }

    change_metadata(checkpoint, rename)
    refused(checkpoint, capsys, 'momentum_buffer', 'another optimizer than Adam')


def test_another_shape_than_the_weight_s_is_refused(checkpoint, capsys):
    """Of a tensor whose grid would do, core's record says that it was another weight's."""

    def transpose(changed):
        changed.mcore_data[MAIN + FC1]['nd_reformulated_orig_global_shape'] = (2, 16, 64)

    change_metadata(checkpoint, transpose)
    refused(checkpoint, capsys, MAIN + FC1, '(2, 16, 64)', '[2, 64, 16]')


def test_shards_of_another_layout_are_refused(checkpoint, capsys):
    """Main parameters saved with TP 2, and a weight in one piece."""

    def unite(changed):
        changed.state_dict_metadata[FC1] = changed.state_dict_metadata[
            'decoder.layers.mlp.linear_fc2.weight'
        ]

    change_metadata(checkpoint, unite)
    refused(checkpoint, capsys, FC1)


def test_steps_that_differ_are_refused(checkpoint, capsys):
    state = common_state(checkpoint)
    state['optimizer']['param_state'] = {0: {'step': torch.tensor(7.0)}}
    torch.save(state, checkpoint / 'common.pt')
    refused(checkpoint, capsys, 'steps [7.0]', '[2.0]')


def test_the_arguments_are_not_believed(checkpoint, tmp_path):
    """The grid tells gate and up apart; what args say of swiglu changes nothing."""
    state = common_state(checkpoint)
    state['args'].swiglu = False
    torch.save(state, checkpoint / 'common.pt')
    convert_optimizer(checkpoint.parent, tmp_path / 'out')
    made = read_tensors(str(tmp_path / 'out' / ITERATION))
    assert digests(made) == expected('core-0.14-tp2-dp2')['optimizer']


def test_weights_without_state_are_told(checkpoint, tmp_path):
    """A frozen parameter has none."""

    def freeze(changed):
        for state in ('fp32_param', 'exp_avg', 'exp_avg_sq'):
            del changed.state_dict_metadata[f'optimizer.state.{state}.{FC1}']

    change_metadata(checkpoint, freeze)
    assert convert_optimizer(checkpoint.parent, tmp_path / 'out').without_state == [FC1]


def test_the_dry_run_tells_what_there_is(checkpoint, tmp_path, capsys):
    arguments = ['--load-dir', str(checkpoint.parent), '--save-dir', str(tmp_path / 'out')]
    assert main([*arguments, '--dry-run']) == 0
    weights = [
        value for key, value in read_tensors(str(checkpoint)).items() if 'optimizer.' not in key
    ]
    elements = sum(weight.numel() for weight in weights)
    assert f'optimizer: {len(weights)} parameters, {elements} elements' in capsys.readouterr().out
    assert not (tmp_path / 'out').exists()


def test_who_would_load_it_is_told_the_command(tmp_path, capsys):
    """By the load itself, the inspector, the resume report and the comparison with the weights."""
    name = 'core-0.13-pp2-fp32'
    old = unpack(name, tmp_path / 'old')
    command = f'convert_ckpt_optimizer.py --load-dir {old / ITERATION} --save-dir {old}-fully-'
    with pytest.raises(AssertionError, match=re.escape(command)):
        resume(name, 2, old, tmp_path)
    assert inspect_checkpoint.main([str(old)]) == 0
    assert capsys.readouterr().out.count(command) == 2
    assert command in describe(read_resume_report(old))
    with pytest.raises(CheckpointingException, match=re.escape(command)):
        check_weights(old)


def test_gathered_buffers_are_refused_by_name(checkpoint, capsys):
    state = common_state(checkpoint)
    state['content_metadata']['distrib_optim_sharding_type'] = 'dp_zero_gather_scatter'
    torch.save(state, checkpoint / 'common.pt')
    refused(checkpoint, capsys, 'dp_zero_gather_scatter')


def test_a_state_in_other_chunks_than_its_weight_is_refused(tmp_path, capsys):
    """State that 0.10 didn't flatten, of a weight of two chunks that it crosses."""
    checkpoint = unpack('core-0.10-dp2', tmp_path / 'old') / ITERATION
    norm = 'decoder.final_layernorm.weight'

    def cut(changed):
        entry = changed.state_dict_metadata[norm]
        whole = entry.chunks[0]
        info = changed.storage_data.pop(MetadataIndex(norm, whole.offsets))
        half = info.length // 2
        entry.chunks = []
        for i in (0, 1):
            chunk = ChunkStorageMetadata(torch.Size([8 * i]), torch.Size([8]))
            entry.chunks.append(chunk)
            changed.storage_data[MetadataIndex(norm, chunk.offsets)] = dataclasses.replace(
                info, offset=info.offset + half * i, length=half
            )

    change_metadata(checkpoint, cut)
    refused(checkpoint, capsys, f'fp32_param.{norm} at [0]', 'another chunk')
