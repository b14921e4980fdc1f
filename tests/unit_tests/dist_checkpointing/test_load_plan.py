"""What is decided of optimizer state, by the kinds of optimizer that the two runs have."""

import math
from argparse import Namespace
from importlib.metadata import version

import pytest
from megatron.core.dist_checkpointing import load_plan
from megatron.core.dist_checkpointing.checkpoint_layout import layout_from_keys
from megatron.core.dist_checkpointing.format_names import FSDP_DTENSOR
from megatron.core.dist_checkpointing.load_plan import any_run, plan_load
from megatron.core.dist_checkpointing.optimizer_load import conversion_command
from megatron.core.dist_checkpointing.stored_checkpoint import (
    StoredCheckpoint,
    needs_undistributed_optimizer,
    stored_optimizer_format,
)

MODEL = {
    'decoder.layers.mlp.linear_fc1.weight': (2, 8, 4),
    'decoder.layers.self_attention.linear_qkv.weight': (2, 12, 4),
    'decoder.final_layernorm.weight': (4,),
}
MOMENTS = {f'chained_0.optimizer.state.momentum_buffer.{key}': MODEL[key] for key in MODEL}
BUCKETS = {'chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.exp_avg': (96,)}
FORMAT = 'distrib_optim_sharding_type'
# keys, and what the metadata says, of a checkpoint -> its format, and which runs take it
STORED = {
    'plain': (MOMENTS, {}, 'plain', {'plain', 'by layers'}),
    'by layers': (MOMENTS, {FORMAT: 'dp_reshardable'}, 'plain', {'plain', 'by layers'}),
    'by layers, a part in buckets': (
        MOMENTS | BUCKETS,
        {FORMAT: 'dp_reshardable'},
        'dp_reshardable',
        set(),
    ),
    'distributed': (
        MOMENTS,
        {FORMAT: 'fully_reshardable'},
        'fully_reshardable',
        {'distributed', 'by layers'},
    ),
}
RUNS = {
    'plain': {'use_distributed_optimizer': False},
    'distributed': {'use_distributed_optimizer': True},
    'by layers': {
        'use_distributed_optimizer': False,
        'use_layer_wise_distributed_optimizer': True,
    },
}


@pytest.mark.parametrize('name', STORED)
def test_which_optimizer_takes_which_state(name):
    keys, content, kind, takers = STORED[name]
    saved = Namespace(num_layers=2, **RUNS['by layers' if 'layers' in name else 'plain'])
    common = {'args': saved, 'content_metadata': content}
    stored = StoredCheckpoint(layout_from_keys(MODEL | keys), common)
    assert stored_optimizer_format(stored) == kind
    assert needs_undistributed_optimizer(stored) == (name == 'plain')
    for run, arguments in RUNS.items():
        args = Namespace(
            hybrid_layer_pattern='*-*-', no_load_optim=False, finetune=False, **arguments
        )
        plan = plan_load(stored, args, 'hybrid')
        assert plan.load_optim and not plan.refusal
        assert bool(plan.optimizer_refusal) == (run not in takers), run
        assert not plan.optimizer_refusal or '--no-load-optim' in plan.optimizer_refusal
    anyone = plan_load(stored, any_run(stored, hybrid_layer_pattern='*-*-'), 'hybrid')
    assert bool(anyone.optimizer_refusal) == (not takers)


def state_of(kind: str, flattened: bool = False) -> dict:
    """Keys of main parameters; a flattened one has the grid of its shards, and their size."""
    return {
        f'chained_0.optimizer.state.{kind}.{key}': (*[1] * len(shape), math.prod(shape))
        if flattened
        else shape
        for key, shape in MODEL.items()
    }


GATHERED = {'optimizer.distributed.dp_group_idx_0.param_state': ()}
DISTRIBUTED = {'use_distributed_optimizer': True}
FULLY = {**DISTRIBUTED, 'ckpt_fully_parallel_save': True}


@pytest.mark.parametrize(
    ('keys', 'args', 'kind'),
    [
        (state_of('fp32_param', flattened=True), {}, 'fully_sharded_model_space'),
        (state_of('fp32_param', flattened=True), DISTRIBUTED, 'fully_sharded_model_space'),
        (state_of('fp32_param'), {}, 'plain'),
        (state_of('fp32_param'), {'use_distributed_optimizer': False}, 'plain'),
        (state_of('param'), {}, 'fully_sharded_model_space'),
        (BUCKETS, {}, 'dp_reshardable'),
        (BUCKETS, FULLY, 'dp_reshardable'),
        (GATHERED, DISTRIBUTED, 'dp_zero_gather_scatter'),
        (MOMENTS, FULLY, 'fully_sharded_model_space'),
    ],
)
@pytest.mark.parametrize('stored_args', [lambda args: Namespace(**args), dict])
def test_formats_without_content_metadata(keys, args, kind, stored_args):
    """The keys decide as far as they can, then the arguments, by upstream's rule."""
    common = {'args': stored_args(args)}
    assert stored_optimizer_format(StoredCheckpoint(layout_from_keys(MODEL | keys), common)) == kind
    if not args:
        assert stored_optimizer_format(StoredCheckpoint(layout_from_keys(MODEL | keys))) == kind


def test_no_load_is_promised_where_core_has_none(monkeypatch):
    """torch 2.6, whose ``load`` megatron-core calls in vain."""
    stored = StoredCheckpoint(layout_from_keys(MODEL), {'args': Namespace(num_layers=2)})
    args = any_run(stored, hybrid_layer_pattern='*-*-')
    monkeypatch.setattr(load_plan.dcp, 'load', lambda state_dict, *, no_dist=False: None)
    assert not plan_load(stored, args, 'hybrid').refusal
    monkeypatch.setattr(load_plan.dcp, 'load', lambda state_dict: None)
    assert 'use torch 2.7 or newer' in plan_load(stored, args, 'hybrid').refusal
    assert plan_load(stored, args, 'gpt') == load_plan.LoadPlan()  # core's own, and its words


def test_a_number_of_layers_is_compared_where_layers_are_translated():
    """Where they are not, megatron does, and frameworks that fill in arguments may not."""
    stored = StoredCheckpoint(layout_from_keys(MODEL), {'args': Namespace(num_layers=7)})
    args = any_run(stored, hybrid_layer_pattern='*-*-', no_load_optim=True)
    assert '7 layers' in plan_load(stored, args, 'hybrid').refusal
    assert plan_load(stored, any_run(stored, num_layers=7), 'gpt').refusal == ''
    of_hybrid = {'args': Namespace(num_layers=2, hybrid_layer_pattern='*-*-')}
    stored = StoredCheckpoint(layout_from_keys(MODEL), of_hybrid)
    assert 'contradicts itself' in plan_load(stored, any_run(stored), 'gpt').refusal


def test_patterns_are_read_as_core_reads_them():
    from megatron.core.dist_checkpointing import pattern_symbols
    from megatron.core.models.hybrid import hybrid_layer_allocation as core

    assert core.Symbols.VALID_LAYERS == pattern_symbols.VALID_LAYERS
    own = {name: value for name, value in vars(pattern_symbols.Symbols).items() if name.isupper()}
    theirs = {name: getattr(core.Symbols, name) for name in own if hasattr(core.Symbols, name)}
    assert theirs == {name: own[name] for name in theirs}
    parts = ['', 'M', '*-', 'M*-|M-', '+E', '*+', 'x', '*D', 'G', '|']
    for main in parts:
        for depths in [], [''], ['', ''], ['*-'], ['*-', '*-'], ['*-', 'M'], ['', 'M'], ['+|']:
            pattern = '/'.join([main, *depths])
            try:
                parsed = core.parse_hybrid_pattern(pattern)
            except ValueError:
                with pytest.raises(ValueError):
                    pattern_symbols.parse_hybrid_pattern(pattern)
                continue
            found = pattern_symbols.parse_hybrid_pattern(pattern)
            expected = parsed.main_pattern or '', parsed.mtp_pattern or '', parsed.mtp_num_depths
            assert (found.main_pattern, found.mtp_pattern, found.mtp_num_depths) == expected


@pytest.mark.parametrize('directory', ['.', 'below/..', '../iter_0000003'])
def test_what_is_converted_lies_beside_the_run(directory, tmp_path, monkeypatch):
    """Wherever the shell is, of which paths without a name tell."""
    iteration = tmp_path / 'run' / 'iter_0000003'
    iteration.mkdir(parents=True)
    monkeypatch.chdir(iteration)
    command = conversion_command(directory)
    assert command.endswith(
        f'--load-dir {directory} --save-dir {iteration.parent}-fully-reshardable'
    )


@pytest.mark.parametrize('run', ['gpt', 'hybrid'])
def test_state_in_buckets_names_the_conversion(run):
    sizes = {'tensor_model_parallel_size': 2, 'pipeline_model_parallel_size': 1}
    saved = Namespace(num_layers=2, use_distributed_optimizer=True, **sizes)
    common = {'args': saved, 'content_metadata': {FORMAT: 'dp_reshardable'}}
    layout = layout_from_keys(MODEL | BUCKETS)
    stored = StoredCheckpoint(layout, common, directory='/ckpt/a b/iter_0000003')
    pattern = {'hybrid_layer_pattern': '*-*-'} if run == 'hybrid' else {}
    other = any_run(stored, **sizes | {'tensor_model_parallel_size': 1}, **pattern)
    command = (
        "convert_ckpt_optimizer.py --load-dir '/ckpt/a b/iter_0000003' "
        "--save-dir '/ckpt/a b-fully-reshardable'"
    )
    assert command in plan_load(stored, other, run).optimizer_refusal
    same = plan_load(stored, any_run(stored, **pattern), run)
    assert bool(same.optimizer_refusal) == (run == 'hybrid')
    for skipped in ('no_load_optim', 'finetune'):
        own = Namespace(**vars(other) | {skipped: True})
        if run == 'gpt' or skipped == 'no_load_optim':
            assert not plan_load(stored, own, run).optimizer_refusal


def fsdp_mixers(convolution: str, **saved) -> StoredCheckpoint:
    """A hybrid checkpoint of Megatron-FSDP."""
    layout = layout_from_keys(
        {
            'model.module.decoder.final_norm.weight': (4,),
            'model.module.decoder.layers.0.mixer.in_proj.weight': (42, 4),
            f'model.module.decoder.layers.0.mixer.{convolution}weight': (24, 1, 4),
        }
    )
    args = Namespace(hybrid_layer_pattern='M', num_layers=1, **saved)
    return StoredCheckpoint(layout, {'args': args}, FSDP_DTENSOR, False, '/ckpt/fsdp/iter_0000003')


def test_rows_of_mamba_layers_in_fsdp_dtensor():
    """Their order goes by the tensor-parallel size, and no shape shows it."""
    own = 'conv1d.' if version('megatron-core').startswith('0.18.') else 'conv1d_'
    (other,) = {'conv1d.', 'conv1d_'} - {own}
    stored = fsdp_mixers(own, tensor_model_parallel_size=2)
    args = Namespace(tensor_model_parallel_size=2, hybrid_layer_pattern='M')
    assert plan_load(stored, args, 'hybrid') == load_plan.LoadPlan()
    args.tensor_model_parallel_size = 1
    refusal = plan_load(stored, args, 'hybrid').refusal
    assert 'in the order of 2 tensor-parallel ranks, and the run has 1' in refusal
    assert conversion_command('/ckpt/fsdp/iter_0000003') in refusal
    refusal = plan_load(fsdp_mixers(other), args, 'hybrid').refusal
    assert f'which calls it mixer.{own}…' in refusal
