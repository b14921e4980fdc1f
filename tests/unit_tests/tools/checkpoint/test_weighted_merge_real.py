"""Weighted merge of checkpoints that real models wrote, loaded back into real models and runs."""

import json
import re

import pytest
import torch
from megatron.core import dist_checkpointing

from tests.cpu_megatron import session, warm
from tests.unit_tests.tools.checkpoint.handmade import assert_same, load_tensors, plain_merge
from tools.checkpoint.weighted_merge import main
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

WEIGHTS = [0.5, 0.8, -0.3]
STORED_NAMES = {  # the local spec stores its norms under the fused names
    'input_layernorm.': 'self_attention.linear_qkv.layer_norm_',
    'pre_mlp_layernorm.': 'mlp.linear_fc1.layer_norm_',
}
KINDS = {
    'gpt': lambda: session.gpt(bf16=True),
    'gpt-fp32-untied': lambda: session.gpt(tied=False),
    'gated': lambda: session.gpt(bf16=True, gated_linear_unit=True, add_bias_linear=False),
    'moe': lambda: session.gpt(
        bf16=True,
        num_moe_experts=4,
        moe_router_load_balancing_type='none',
        moe_router_score_function='sigmoid',
        moe_router_enable_expert_bias=True,
    ),
    'hybrid': lambda: session.hybrid('M*-M*-', bf16=True),
}


def unwrapped(chunk):
    return getattr(chunk, 'module', chunk)


def randomise(model, seed):
    """Every parameter and buffer its own values, fp32 ones too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))


def values(model):
    return {
        key: value.detach().clone()
        for key, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize(
    'kind, prefix',
    [
        *((kind, '') for kind in KINDS),
        ('gpt', 'model.'),
        ('hybrid', 'model0.'),
    ],
)
def test_models_written_merged_and_loaded(tmp_path, kind, prefix):
    with session.model_parallel():
        model = unwrapped(KINDS[kind]()[0])
        paths, models = [], []
        for seed in range(3):
            randomise(model, seed)
            paths.append(tmp_path / f'iter_{seed:07d}')
            paths[-1].mkdir()
            dist_checkpointing.save(
                {'model': model.sharded_state_dict(prefix=prefix), 'iteration': seed},
                str(paths[-1]),
            )
            models.append(values(model))
        result = merge(paths, WEIGHTS, tmp_path / 'out', 1, verify=True)
        randomise(model, 99)
        loaded = dist_checkpointing.load(
            {'model': model.sharded_state_dict(prefix=prefix)},
            str(result.output_dir),
            strict=dist_checkpointing.validation.StrictHandling.RAISE_ALL,
        )
        state = {key.removeprefix(prefix): value for key, value in loaded['model'].items()}
        model.load_state_dict(state)
        found = values(model)
        assert loaded['iteration'] == 1
    expected = plain_merge(models, WEIGHTS)
    assert_same(found, expected)
    if kind == 'moe':
        assert any(value.dtype == torch.float32 for value in expected.values())
        merge(
            paths, WEIGHTS, tmp_path / 'narrow', save_dtype='bfloat16', keep_fp32=['*expert_bias']
        )
    one = merge(paths[:1], [1.0], tmp_path / 'one').output_dir
    assert_same(load_tensors(one), load_tensors(paths[0]))


def test_a_training_checkpoint_needs_model_only(tmp_path, capsys):
    with session.model_parallel():
        run = session.Training.start(session.gpt(), session.distributed_optimizer())
        for iteration in (1, 2):
            run.train(1)
            run.save(tmp_path / f'iter_{iteration:07d}')
    arguments = [
        '--merge-inputs',
        str(tmp_path),
        '--start-checkpoint',
        '1',
        '--end-checkpoint',
        '2',
        '--merge-output',
        str(tmp_path / 'out'),
        '--verify',
    ]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert 'training state (optimizer' in error and '--model-only' in error
    assert main([*arguments, '--model-only']) == 0
    found = load_tensors(tmp_path / 'out/iter_0000002')
    assert found and not any(key.startswith(('optimizer', 'chained')) for key in found)
    sources = [
        {key: value for key, value in load_tensors(tmp_path / name).items() if key in found}
        for name in ('iter_0000001', 'iter_0000002')
    ]
    assert_same(found, plain_merge(sources, [0.5, 0.5]))


def test_a_merged_checkpoint_loads_in_a_real_run(tmp_path, monkeypatch):
    for name in ('FLASH', 'FUSED', 'UNFUSED'):  # set by models built in this process
        monkeypatch.delenv(f'NVTE_{name}_ATTN', raising=False)
    pretrain = 'tests.cpu_megatron.pretrain'
    warm.run(
        1,
        pretrain,
        'gpt',
        '--save',
        str(tmp_path / 'run'),
        '--save-interval',
        '2',
        '--train-iters',
        '4',
        '--ckpt-format',
        'torch_dist',
    )
    assert (
        main(
            [
                '--merge-inputs',
                str(tmp_path / 'run'),
                '--start-checkpoint',
                '2',
                '--end-checkpoint',
                '4',
                '--merge-style',
                'minus-sqrt',
                '--model-only',
                '--merge-output',
                str(tmp_path / 'merged'),
            ]
        )
        == 0
    )
    # a learning rate of zero: what is dumped after a step is what was loaded
    warm.run(
        1,
        pretrain,
        'gpt',
        '--load',
        str(tmp_path / 'merged'),
        '--no-load-optim',
        '--no-load-rng',
        '--train-iters',
        '5',
        '--lr',
        '0',
        '--min-lr',
        '0',
        '--ckpt-format',
        'torch_dist',
        '--override-opt_param-scheduler',
        '--cpu-log',
        str(tmp_path / 'log'),
        '--cpu-dump',
        str(tmp_path / 'dump'),
    )
    first = json.loads((tmp_path / 'log').read_text().splitlines()[0])
    assert first['iteration'] == 5
    dumped = torch.load(tmp_path / 'dump.0')['model']
    merged = load_tensors(tmp_path / 'merged/iter_0000004')
    compared = 0
    for name, value in dumped.items():
        match = re.search(r'((?:embedding|decoder|output_layer)\..*)', name)
        key, layer = match.group(1), None
        if found := re.match(r'decoder\.layers\.(\d+)\.(.*)', key):
            layer, key = int(found.group(1)), f'decoder.layers.{found.group(2)}'
        for local, stored in STORED_NAMES.items():
            key = key.replace(local, stored)
        expected = merged[key] if layer is None else merged[key][layer]
        assert torch.equal(value, expected), name
        compared += 1
    assert compared >= 20
