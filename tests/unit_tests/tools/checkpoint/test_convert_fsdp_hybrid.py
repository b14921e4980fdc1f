"""Conversion of hybrid models' fsdp_dtensor checkpoints: Mamba's parts, names, refusals."""

import shutil
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_layout import layout_from_keys
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.unit_tests.dist_checkpointing.gpt_runs import needs_latent_layers
from tests.unit_tests.optimizer.resume_runs import launch, read_records
from tests.unit_tests.tools.checkpoint.fsdp_twins import (
    FSDP,
    LEFT_OUT,
    SEVERAL_CONNECTIONS,
    fsdp_differences,
    make_fsdp_twins,
)
from tests.unit_tests.tools.checkpoint.handmade import tree
from tests.unit_tests.tools.checkpoint.optimizer_twins import differences
from tests.unit_tests.tools.checkpoint.test_convert_fsdp import (
    META,
    STATE,
    edit,
    rename,
    set_arguments,
)
from tests.unit_tests.tools.checkpoint.test_convert_optimizer import (
    flip_bit,
    refused,
    set_argument,
)
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.convert_ckpt_optimizer import convert_optimizer
from tools.checkpoint.optimizer_layouts import fsdp_model
from tools.checkpoint.optimizer_layouts.fsdp_model import names_of_model
from tools.checkpoint.optimizer_layouts.fsdp_names import Place

PATTERN = 'M*-ME'
IN_0_18 = version('megatron-core').startswith('0.18.')
CONVOLUTION, OTHER_CONVOLUTION = ['conv1d.', 'conv1d_'][:: 1 if IN_0_18 else -1]
MIXER = 'decoder.layers.3.mixer.'
PREFIXES = ('model.module.', STATE, META)


@pytest.fixture(scope='module')
def twins(tmp_path_factory):
    """Of all known layers, gated, bf16, on one rank."""
    directory = tmp_path_factory.mktemp('twins')
    arguments = ['--bf16', '--swiglu', '--num-experts', '4', '--hybrid-layer-pattern', PATTERN]
    return make_fsdp_twins(directory, 1, *arguments, kind='hybrid')


@pytest.fixture
def source(twins, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(twins.fsdp, tmp_path / 'source'))


@pytest.fixture
def stored(twins, tmp_path):
    """A copy of the twin to damage."""
    return Path(shutil.copytree(twins.torch_dist, tmp_path / 'stored'))


def refused_to_fsdp(stored: Path, tmp_path: Path, *told: str) -> None:
    before = tree(stored)
    with pytest.raises(CheckpointError) as error:
        convert_optimizer(stored, tmp_path / 'out', to='fsdp_dtensor')
    for text in told:
        assert text in str(error.value)
    assert not (tmp_path / 'out').exists() and tree(stored) == before


def test_a_layer_lacks_a_weight(source, tmp_path):
    """Its layers aren't stacked, so that no shape tells."""
    for prefix in PREFIXES:
        rename(source, f'{prefix}{MIXER}D', None)
    refused(source, tmp_path, f"no {MIXER}D, which other layers 'M' have")


@pytest.mark.parametrize(
    ('arguments', 'told'),
    [
        ({'hybrid_layer_pattern': 'MG-ME'}, "layers 'G'"),
        ({'hybrid_layer_pattern': 'MM-ME'}, "its keys are of layers 'M*-ME'"),
        ({'hybrid_layer_pattern': None}, 'of a hybrid model (model.module.decoder.'),
        ({'spec': ['my.specs', 'stack']}, 'a layer spec of its own'),
        ({'num_layers': 4}, '5 layers are stored, args.num_layers is 4'),
        ({'tensor_model_parallel_size': 2}, 'chunks of [64] of its 64 columns, expected 32'),
        ({'tensor_model_parallel_size': None}, 'args.tensor_model_parallel_size is None'),
        ({'swiglu': False}, 'a hybrid model with no --swiglu and 4 experts'),
    ],
)
def test_arguments_of_another_model(source, tmp_path, arguments, told):
    set_arguments(source, **arguments)
    refused(source, tmp_path, told)


@pytest.mark.parametrize(
    'part', ['in_proj.weight', f'{CONVOLUTION}weight', 'dt_bias', 'out_proj.weight']
)
def test_rows_that_do_not_add_up(source, tmp_path, part):
    of = f'{MIXER}{part}'
    axis = 1 if 'out_proj' in part else 0

    def shorten(metadata):
        for key in (f'model.module.{of}', f'{STATE}{of}.exp_avg', f'{STATE}{of}.exp_avg_sq'):
            entry = metadata.state_dict_metadata[key]
            size = list(entry.size)
            size[axis] -= 2
            entry.size = torch.Size(size)
            entry.chunks[0].__dict__['sizes'] = torch.Size(size)

    edit(source, shorten)
    refused(source, tmp_path, f'{MIXER}', 'by the shapes of in_proj, out_proj and dt_bias')


def test_the_convolution_of_the_other_release(twins, source, tmp_path):
    """A module in one and two parameters in the other, and the same weights in torch_dist."""
    for prefix in PREFIXES:
        for layer in (0, 3):
            start = f'{prefix}decoder.layers.{layer}.mixer.'
            rename(source, start + CONVOLUTION, start + OTHER_CONVOLUTION)
    convert_optimizer(source, tmp_path / 'out')
    assert differences(tmp_path / 'out', twins.torch_dist) == LEFT_OUT


@pytest.mark.parametrize('part', ['z', 'dt'])
def test_a_part_is_missing(stored, tmp_path, part):
    of = f'{MIXER}in_proj.weight'
    for state in ('', *(f'optimizer.state.{s}.' for s in ('param', 'exp_avg', 'exp_avg_sq'))):
        rename(stored, f'{state}{of}.{part}', None)
    refused_to_fsdp(stored, tmp_path, f"no {of}.{part}, which other layers 'M' have")


def test_a_part_has_no_state(stored, tmp_path):
    of = f'{MIXER}in_proj.weight'
    for state in ('param', 'exp_avg', 'exp_avg_sq'):
        rename(stored, f'optimizer.state.{state}.{of}.B', None)
    refused_to_fsdp(stored, tmp_path, f'no optimizer state of {of}.B, but of other parts of {of}')


def test_ranks_that_rows_can_not_be_shared_by(stored, tmp_path):
    set_argument(stored, 'tensor_model_parallel_size', 3)
    refused_to_fsdp(stored, tmp_path, 'has 64 rows, expected a multiple of', '3')


@pytest.mark.parametrize(('gated', 'rows'), [(False, 128), (True, 64)])
def test_arguments_that_contradict_the_width_of_an_mlp(stored, tmp_path, gated, rows):
    """Gate and up would be one parameter, or one parameter two; a load passes over such names."""
    fc1 = 'decoder.layers.2.mlp.linear_fc1.weight'

    def narrow(metadata):
        for state in ('', *(f'optimizer.state.{s}.' for s in ('param', 'exp_avg', 'exp_avg_sq'))):
            entry = metadata.state_dict_metadata[state + fc1]
            entry.size = torch.Size([rows, 32])
            entry.chunks = [chunk for chunk in entry.chunks if chunk.offsets[0] < rows]

    set_argument(stored, 'swiglu', gated)
    edit(stored, narrow)
    told = f'{fc1} is [{rows}, 32]', '[32, 64]', f'args.swiglu is {gated}'
    refused_to_fsdp(stored, tmp_path, *told)


def test_a_weight_that_is_not_its_main_parameter(stored, tmp_path):
    key = f'{MIXER}in_proj.weight.C'
    flip_bit(stored, MetadataIndex(key, torch.Size([0, 0])), 0)
    refused_to_fsdp(stored, tmp_path, f'taken for {key}')


def test_frozen_mixers(twins, source, tmp_path):
    """They have neither state nor settings, and stay so in both directions."""
    for prefix in (STATE, META):
        rename(source, f'{prefix}{MIXER}', None)
    result = convert_optimizer(source, tmp_path / 'out', verify=True)
    assert result.without_state and all(name.startswith(MIXER) for name in result.without_state)
    convert_optimizer(tmp_path / 'out', tmp_path / 'back', to='fsdp_dtensor')
    found = fsdp_differences(tmp_path / 'back', source)
    assert [name for name in found if 'rng_state' not in name] == []


def test_the_report_names_the_size_that_the_rows_are_for(twins, tmp_path):
    result = convert_optimizer(twins.torch_dist, tmp_path / 'out', to='fsdp_dtensor')
    assert any('--tensor-model-parallel-size 1' in warning for warning in result.warnings)


@pytest.mark.skipif(IN_0_18, reason='megatron-core 0.18 loads fsdp_dtensor unseen')
def test_a_run_of_another_size_is_refused(twins, tmp_path):
    """megatron-core alone takes the rows for others, and trains on."""
    arguments = [*twins.arguments, *FSDP, '--load', str(twins.fsdp), '--train-iters', '4']
    task = {
        'name': 'other',
        'kind': 'hybrid',
        'arguments': [*arguments, '--tensor-model-parallel-size', '2'],
        'result': str(tmp_path / 'record'),
    }
    launch(2, [task], tmp_path / 'tasks.json', **SEVERAL_CONNECTIONS)
    with pytest.raises(AssertionError) as error:
        read_records(tmp_path / 'record')
    assert 'in the order of 1 tensor-parallel ranks, and the run has 2' in str(error.value)
    command = f'convert_ckpt_optimizer.py --load-dir {twins.fsdp / "iter_0000003"} --save-dir'
    assert command in str(error.value)


@needs_latent_layers
def test_multi_latent_attention(tmp_path):
    latent = [
        *('--hybrid-layer-pattern', 'M+-', '--multi-latent-attention'),
        *('--q-lora-rank', '16', '--kv-lora-rank', '16'),
        *('--v-head-dim', '8', '--qk-head-dim', '8', '--qk-pos-emb-head-dim', '8'),
    ]
    twins = make_fsdp_twins(tmp_path, 1, *latent, kind='hybrid')
    convert_optimizer(twins.fsdp, tmp_path / 'converted')
    assert differences(tmp_path / 'converted', twins.torch_dist) == LEFT_OUT
    convert_optimizer(twins.torch_dist, tmp_path / 'back', to='fsdp_dtensor')
    found = fsdp_differences(tmp_path / 'back', twins.fsdp)
    assert [key for key in found if 'rng_state' not in key] == ['args']


@pytest.mark.parametrize(
    ('spec', 'known'),
    [
        (['megatron.core.models.hybrid.hybrid_layer_specs', 'hybrid_stack_spec'], True),
        (['megatron.core.models.mamba.mamba_layer_specs', 'mamba_stack_spec'], True),
        (None, True),
        (['megatron.core.models.hybrid.hybrid_layer_specs', 'other_spec'], False),
        (['local'], False),
    ],
)
def test_names_with_transformer_engine(tmp_path, monkeypatch, spec, known):
    """Whose layers have their norms in linear layers, and their experts in one module."""
    own = [
        'decoder.final_norm.weight',
        'decoder.layers.0.mixer.in_proj.layer_norm_weight',
        'decoder.layers.1.pre_mlp_layernorm.weight',
        'decoder.layers.1.mlp.experts.linear_fc2.weight0',
    ]
    layout = layout_from_keys({f'model.module.{key}': (4, 4) for key in own})
    args = Namespace(
        num_layers=2,
        num_experts=2,
        transformer_impl='transformer_engine',
        hybrid_layer_pattern='ME',
        spec=spec,
    )
    if not known:
        with pytest.raises(CheckpointError, match='a layer spec of its own'):
            names_of_model(args, layout, tmp_path)
        return
    names = names_of_model(args, layout, tmp_path)
    assert [names.place(name) for name in own[:3]] == [Place(name) for name in own[:3]]
    experts = 'decoder.layers.1.mlp.experts.experts.linear_fc2.weight'
    assert names.place(own[3]) == Place(experts, expert=0)
    weight = 'decoder.layers.0.mixer.conv1d.weight'
    of_release = [f'decoder.layers.0.mixer.{name}weight' for name in (CONVOLUTION, 'conv1d.')]
    monkeypatch.setattr(fsdp_model, 'convolution', lambda: '')  # without megatron-core
    later = Namespace(**vars(args), mamba_training_ssm_states_dtype=None)
    of_saved = [names_of_model(a, layout, tmp_path) for a in (args, later)]
    found = [next(each.names(weight))[0] for each in (names, *of_saved)]
    assert found == [*of_release, weight.replace('conv1d.', 'conv1d_')]
    assert next(names.names(experts)) == (own[3], Place(experts, expert=0))
    extra = set(names.extra_states(['decoder.layers.0.mixer.in_proj.weight', *own[:1]]))
    assert extra == {
        'decoder.final_norm._extra_state/shard_0_1',
        'decoder.layers.0.mixer.in_proj._extra_state/shard_0_1',
        'output_layer._extra_state/shard_0_1',
    }
