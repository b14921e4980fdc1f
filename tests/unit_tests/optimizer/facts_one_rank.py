"""Facts that one process shows."""

import copy
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from tests.cpu_megatron.recorder import model_state, optimizer_shards, optimizer_state
from tests.cpu_megatron.session import model_parallel
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
        resumed(path / sharding_type, sharding_type, bf16=False)


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


@fact(11, 'weights loaded without optimizer state are what the first step starts from')
def weights_only_load(path):
    weights_only(path, reload=True, **offload(0.5))
    weights_only(path, reload=True, **offload(0.5, precision_aware=False))


@fact(11, 'also where nobody tells the optimizer that weights were loaded')
def weights_loaded_behind_the_optimizer(path):
    weights_only(path, reload=False, **offload(0.5))
    weights_only(path, reload=False, **offload(1.0))


@fact(12, 'asking for a loading template moves no parameter and uses no random number')
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
    for part in run.optimizer.chained_optimizers:
        part.optimizer.dummy_step()
        inner_params = part.optimizer.param_to_inner_param.values()
        assert all(param.grad is None for param in inner_params), 'random gradients are left'


@fact(13, 'several buckets')
def several_buckets(path):
    for options in ({}, offload(0.5)):
        for sharding_type in FORMATS:
            name = f'{sharding_type}{len(options)}'
            resumed(path / name, sharding_type, bucket_size=3000, **options)
