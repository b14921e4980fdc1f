"""Facts that one process shows."""

import copy
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from tests.cpu_megatron.recorder import model_state, optimizer_shards, optimizer_state
from tests.cpu_megatron.session import model_parallel
from tests.cpu_megatron.whole_checkpoint import read_tensors
from tests.unit_tests.optimizer.fact_runs import (
    FORMATS,
    FUSED,
    equal,
    fact,
    offload,
    resumed,
    resumed_with_leaked_step,
    start,
    start_warm,
    steps,
)


@fact(1, 'Adam in host memory goes on with the step that was saved')
def step_is_not_reset(path):
    with model_parallel():
        first = start(**offload(1.0))
        first.train(3)
        first.save(path, 'dp_reshardable')
        second = start_warm(**offload(1.0))
        second.load(path)
    assert steps(second.optimizer) == {3}, f'step {steps(second.optimizer)} instead of 3'


@fact(2, 'a checkpoint whose common state holds steps loads')
def leaked_step_on_one_rank(path):
    resumed_with_leaked_step(path)


@fact(3, 'each parameter counts its own steps', when=not FUSED)
def step_is_not_shared(path):
    for sharding_type in reversed(FORMATS):
        with model_parallel():
            first = start()
            first.train(3)
            first.save(path / sharding_type, sharding_type)
            second = start_warm()
            second.load(path / sharding_type)
            second.train(1)
        found = steps(second.optimizer)
        assert found == {4}, f'step {sorted(found)} instead of 4 after one step'


@fact(4, 'FusedAdam counts on after the load', when=FUSED)
def step_is_not_pinned(path):
    for sharding_type in reversed(FORMATS):
        with model_parallel():
            first = start(**offload(0.5))
            first.train(3)
            first.save(path / sharding_type, sharding_type)
            second = start(**offload(0.5))
            second.load(path / sharding_type)
            second.train(3)
        found = steps(second.optimizer)
        assert found == {6}, f'steps {sorted(found)} instead of 6 after three more'


@fact(4, 'FusedAdam counts on with nothing offloaded, too', when=FUSED)
def step_is_saved_without_host_part(path):
    for sharding_type in reversed(FORMATS):
        resumed(path / sharding_type, sharding_type, **offload(0.0))


def clone_request(state: dict) -> dict:
    """Take the request's tensors apart from the optimizer's own."""
    if isinstance(state, dict):
        return {key: clone_request(value) for key, value in state.items()}
    if isinstance(state, list):
        return [clone_request(value) for value in state]
    if isinstance(state, ShardedTensor):
        state.data = state.data.detach().clone()
    return state


@fact(5, 'inner parameters are loaded when the request holds copies')
def masters_are_not_stale(path):
    for fraction in (1.0, 0.5):
        for sharding_type in reversed(FORMATS):
            name = path / f'{sharding_type}{fraction}'
            with model_parallel():
                first = start(**offload(fraction))
                first.train(3)
                first.save(name, sharding_type)
                saved = inner_parameters(first.optimizer)
            with model_parallel(seed=4321):
                second = start_warm(**offload(fraction))
                second.load(name, clone_request)
                equal(saved, inner_parameters(second.optimizer))


def inner_parameters(optimizer) -> dict:
    """What the sub-optimizers of hybrid device optimizers step."""
    return {
        name: value
        for name, (_, value) in optimizer_shards(optimizer).items()
        if name.endswith('.inner')
    }


@fact(6, 'an optimizer that has not stepped can be loaded into')
def unstepped_optimizer(path):
    for sharding_type in FORMATS:
        with model_parallel():
            run = start()
            run.state_dict({'distrib_optim_sharding_type': sharding_type}, is_loading=True)


@fact(6, 'the precision-aware optimizer, too, and its fresh state is the weights', when=FUSED)
def unstepped_precision_aware_optimizer(path):
    for sharding_type in FORMATS:
        with model_parallel():
            run = start(use_precision_aware_optimizer=True)
            run.state_dict({'distrib_optim_sharding_type': sharding_type}, is_loading=True)
        shards = {key: shard for key, (_, shard) in optimizer_shards(run.optimizer).items()}
        for key, shard in shards.items():
            name, _, state = key.rpartition('.')
            if state == 'master_param':
                equal({key: shards[f'{name}.param'].float()}, {key: shard})
            elif state != 'param':
                assert not shard.any(), f'{key} is not zero'
        resumed(path / sharding_type, sharding_type, use_precision_aware_optimizer=True)


@fact(7, 'Adam resumes from every format')
def plain_adam(path):
    for sharding_type in FORMATS:
        resumed(path / sharding_type, sharding_type)


@fact(7, 'fp32 parameters resume from every format')
def fp32_parameters(path):
    for sharding_type in FORMATS:
        resumed(path / sharding_type, sharding_type, dtype='fp32')


@fact(7, 'offloading resumes without the precision-aware optimizer, too')
def offload_not_precision_aware(path):
    for sharding_type in FORMATS:
        resumed(path / sharding_type, sharding_type, **offload(0.5, precision_aware=False))


@fact(7, 'HybridDeviceOptimizer takes state of fp32 parameters')
def fp32_parameters_of_hybrid_device_optimizer(path):
    from megatron.core.optimizer import Adam

    def build(seed):
        make = torch.Generator().manual_seed(seed)
        params = [
            torch.nn.Parameter(torch.randn(shape, generator=make).to(dtype))
            for shape, dtype in ((8, torch.float32), (6, torch.bfloat16), (5, torch.float32))
        ]
        optimizer = HybridDeviceOptimizer(
            [{'params': params}],
            offload_fraction=0.5,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=Adam,
            param_update_in_fp32=True,
            lr=0.1,
            weight_decay=0.01,
        )
        return params, optimizer

    def train(params, optimizer, seeds):
        for seed in seeds:
            make = torch.Generator().manual_seed(seed)
            for param in params:
                param.grad = torch.randn(param.shape, generator=make).to(param.dtype)
            optimizer.step()

    (params, optimizer), (others, other) = build(1), build(2)
    train(params, optimizer, [10, 11, 12])
    for param, target in zip(params, others, strict=True):
        target.data.copy_(param.data)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(params, optimizer, [13, 14, 15])
    train(others, other, [13, 14, 15])
    for param, target in zip(params, others, strict=True):
        equal({'param': param.data}, {'param': target.data})


def weights_only(path: Path, reload: bool, **options) -> None:
    """Train, save, load the weights alone, and train on: as from the loaded weights."""
    with model_parallel():
        first = start(**options)
        first.train(3)
        weights = [chunk.module.module.state_dict() for chunk in first.model]
    runs = []
    for fresh_seed in (1, 2):
        with model_parallel(seed=fresh_seed):
            run = start(**options)
            for chunk, state in zip(run.model, weights, strict=True):
                chunk.module.module.load_state_dict(state)
            if reload:
                run.optimizer.reload_model_params()
            run.train(3)
        runs.append(run)
    equal(model_state(runs[0].model), model_state(runs[1].model))


@fact(8, 'weights loaded without optimizer state are what the first step starts from')
def weights_only_load(path):
    weights_only(path, reload=True, **offload(0.5))
    weights_only(path, reload=True, **offload(0.5, precision_aware=False))


@fact(8, 'also where nobody tells the optimizer that weights were loaded')
def weights_loaded_behind_the_optimizer(path):
    weights_only(path, reload=False, **offload(0.5))
    weights_only(path, reload=False, **offload(1.0))


@fact(9, 'asking for a loading template moves no parameter and uses no random number')
def dummy_step_leaves_nothing(path):
    for sharding_type in FORMATS:
        with model_parallel():
            run = start(**offload(0.5))
            before, random_state = model_state(run.model), torch.get_rng_state()
            run.state_dict({'distrib_optim_sharding_type': sharding_type}, is_loading=True)
            equal({'random state': random_state}, {'random state': torch.get_rng_state()})
            equal(before, model_state(run.model))
            for key, value in optimizer_state(run.optimizer).items():
                if key.rsplit('.', 1)[1] in ('exp_avg', 'exp_avg_sq', 'step'):
                    assert not value.any(), f'{key} is not zero'
            left = {name for _, name in gradients(run)}
            assert left == {'main_grad'}, f'gradients are left: {left}'


def gradients(run) -> dict[tuple, torch.Tensor]:
    """Every gradient that the model's, the optimizer's and its inner parameters have."""
    params = {*run.optimizer.get_parameters(), *run.model[0].parameters()}
    for part in run.optimizer.chained_optimizers:
        params.update(getattr(part.optimizer, 'param_to_inner_param', {}).values())
    return {
        (id(param), name): gradient
        for param in params
        for name in ('grad', 'decoupled_grad', 'main_grad')
        if (gradient := getattr(param, name, None)) is not None
    }


@fact(9, "saving and asking for a template leave a run's gradients alone, whatever the optimizer")
def gradients_are_left_alone(path):
    for options in (
        offload(0.5),
        offload(1.0, precision_aware=False),
        {},
        {'use_distributed_optimizer': False},
        {'use_distributed_optimizer': False, 'dtype': 'fp32'},
    ):
        with model_parallel():
            run = start(**options)
            with mock.patch.object(run.optimizer, 'step', run.optimizer.prepare_grads):
                run.train(1)
            before, random_state = gradients(run), torch.get_rng_state()
            values = {key: gradient.clone() for key, gradient in before.items()}
            weights = model_state(run.model)
            for is_loading in (True, False):
                run.state_dict({'distrib_optim_sharding_type': 'dp_reshardable'}, is_loading)
            after = gradients(run)
            assert before.keys() == after.keys() and len(before) > 20
            assert all(before[key] is after[key] for key in before), 'other tensors'
            equal(values, after)
            equal({'random state': random_state}, {'random state': torch.get_rng_state()})
            equal(weights, model_state(run.model))


@fact(11, 'saving before the first step, with infinite gradients, leaves an fp16 run as it was')
def saved_before_the_first_step(path):
    # the first gradients overflow, and the loss scale that they leave behind fits
    fp16 = {'dtype': 'fp16', 'initial_loss_scale': 2.0**18, 'hysteresis': 1}
    fully, in_buckets = FORMATS
    for sharding_type, options in (
        (in_buckets, {}),
        (in_buckets, offload(0.5)),
        (fully, offload(1.0)),
    ):
        with model_parallel():
            unsaved = start(**fp16, **options)
            losses = unsaved.train(4)
        assert steps(unsaved.optimizer) == {3}, f'{steps(unsaved.optimizer)} steps instead of 3'
        name = path / f'{options.get("optimizer_offload_fraction")}'
        for run in resumed(name, sharding_type, before=1, after=3, **fp16, **options):
            equal(optimizer_state(unsaved.optimizer), optimizer_state(run.optimizer))
            equal(model_state(unsaved.model), model_state(run.model))
            assert run.losses[-3:] == losses[-3:], f'losses {run.losses} instead of {losses}'


@fact(11, 'a running optimizer that never stepped takes a checkpoint, its gradients zeroed or not')
def loaded_before_the_first_step(path):
    fully, in_buckets = FORMATS
    for sharding_type, zeroed, options in (
        (in_buckets, False, offload(0.5)),
        (fully, True, offload(0.5)),
        (in_buckets, True, offload(0.5, precision_aware=False)),
    ):
        name = path / f'{sharding_type}{options["use_precision_aware_optimizer"]}'
        with model_parallel():
            whole = start('fp16', initial_loss_scale=1.0, **options)
            whole.train(3)
            whole.save(name, sharding_type)
            losses = whole.train(3)
        with model_parallel(seed=4321):
            rest = start('fp16', **options)
            rest.train(1)
            if zeroed:
                rest.optimizer.zero_grad()
            rest.load(name)
            found = rest.train(3)
        equal(optimizer_state(whole.optimizer), optimizer_state(rest.optimizer))
        equal(model_state(whole.model), model_state(rest.model))
        assert losses == found, f'losses {found} instead of {losses}'


@contextmanager
def half_by_default():
    """Inside, whoever doesn't say what tensors he wants gets bfloat16."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


@fact(14, "the process's default dtype takes no part")
def default_dtype_takes_no_part(path):
    for options in ({}, offload(0.5)):
        for sharding_type in FORMATS:
            name = path / f'{sharding_type}{len(options)}'
            resumed(name, sharding_type, around=half_by_default, **options)


def with_fp32_norms(model: torch.nn.Module) -> None:
    """Make parameters fp32 that stand between others of their group."""
    for layer in model.module.decoder.layers:
        layer.input_layernorm.float()


@fact(12, 'bf16 and fp32 parameters in one group: each has its own state under its own name')
def mixed_group(path):
    # with biases parameters are of different sizes, without all of their group are of the same
    for biases in (True, False):
        model = {'add_bias_linear': biases}
        for sharding_type in FORMATS:
            name = path / f'{sharding_type}{biases}'
            whole, _ = resumed(name, sharding_type, prepare_model=with_fp32_norms, model=model)
            assert len(whole.model[0].buffers) == 2
            if sharding_type == 'fully_reshardable':
                check_names(name)


def check_names(path: Path) -> None:
    """Compare each stored weight with the main parameter that is stored under its name."""
    stored = read_tensors(str(path))
    weights = {key: value for key, value in stored.items() if not key.startswith('optimizer.')}
    equal(
        weights,
        {key: stored[f'optimizer.state.param.{key}'].to(weights[key].dtype) for key in weights},
    )


@fact(10, 'several buckets')
def several_buckets(path):
    for options in ({}, offload(0.5)):
        for sharding_type in FORMATS:
            name = f'{sharding_type}{len(options)}'
            resumed(path / name, sharding_type, bucket_size=3000, **options)
