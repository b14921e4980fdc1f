"""What becomes of the optimizer over a save and a load, fact by fact.

    python -m tests.unit_tests.optimizer.facts [--results FILE]

prints one line a fact: whether it is as it should be, and what was found. ``MEGATRON_OVERLAY=0``
shows what stock megatron-core does, ``CPU_MEGATRON_OPTIMIZER=fused_adam`` takes an Adam with
FusedAdam's conventions; both are told in the first line. Facts that differ between ranks need two
processes, as ``torchrun --nproc-per-node 2`` starts them.
"""

import argparse
import copy
import json
import logging
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from tests.cpu_megatron.pretrain import prepare

warnings.simplefilter('ignore')
prepare(simulate_devices=True)

from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer  # noqa: E402

from tests.cpu_megatron.recorder import (  # noqa: E402
    model_state,
    optimizer_shards,
    optimizer_state,
)
from tests.cpu_megatron.session import (  # noqa: E402
    Training,
    distributed_optimizer,
    gpt,
    model_parallel,
)
from tests.unit_tests.optimizer.leaked_steps import save_with_leaked_steps  # noqa: E402

FUSED = os.environ.get('CPU_MEGATRON_OPTIMIZER') == 'fused_adam'
FORMATS = ('fully_reshardable', 'dp_reshardable')
FACTS: list[tuple[str, str, Callable]] = []


def fact(number: int, text: str, when: bool = True, ranks: int = 1):
    """Register a check; it raises where the fact doesn't hold."""

    def register(check: Callable[[Path], None]):
        if when and int(os.environ.get('WORLD_SIZE', '1')) == ranks:
            FACTS.append((f'{number} {check.__name__}', text, check))
        return check

    return register


def start(seed: int = 1234, bf16: bool = True, bucket_size: int | None = None, **options):
    """A fresh model and optimizer in a fresh random state."""
    return Training.start(
        gpt(bf16=bf16), distributed_optimizer(bf16=bf16, **options), bucket_size=bucket_size
    )


def offload(fraction: float, precision_aware: bool = True) -> dict:
    """Options of a hybrid device optimizer."""
    return {
        'optimizer_cpu_offload': True,
        'optimizer_offload_fraction': fraction,
        'use_precision_aware_optimizer': precision_aware,
        'overlap_cpu_optimizer_d2h_h2d': True,
    }


def start_warm(**options):
    """As :func:`start`; stepped where stock can't be loaded into otherwise (fact 6)."""
    run = start(**options)
    if not FUSED:
        run.train(1)
    return run


def resumed(path: Path, sharding_type: str, before: int = 3, after: int = 3, prepare=None, **run):
    """Train ``before + after`` steps in one go and with a save and a load between; compare.

    Raises:
        AssertionError: a loss, a parameter, a moment or a step differs.
    """
    with model_parallel():
        whole = start(**run)
        whole.train(before)
        whole.save(path, sharding_type)
        losses = whole.train(after)
    with model_parallel(seed=4321):
        rest = start_warm(**run)
        rest.load(path, *filter(None, [prepare]))
        found = rest.train(after)
    equal(optimizer_state(whole.optimizer), optimizer_state(rest.optimizer))
    equal(model_state(whole.model), model_state(rest.model))
    assert losses == found, f'losses {found} instead of {losses}'


def equal(expected: dict, found: dict) -> None:
    """Raise unless both hold the same keys with the same bits."""
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    assert not missing and not extra, f'missing {sorted(missing)[:3]}, extra {sorted(extra)[:3]}'
    wrong = [key for key, value in expected.items() if not torch.equal(value, found[key])]
    first = wrong[0] if wrong else ''
    if first and expected[first].dim() == 0:
        first += f' is {found[first]:g} instead of {expected[first]:g}'
    assert not wrong, f'{len(wrong)} of {len(expected)} differ: {first}'


def steps(optimizer) -> set[float]:
    """All step counts the sub-optimizers hold."""
    return {
        float(counted['step'])
        for part in optimizer.chained_optimizers
        for sub_optimizer in getattr(part.optimizer, 'sub_optimizers', [part.optimizer])
        for counted in (*sub_optimizer.state.values(), *sub_optimizer.param_groups)
        if 'step' in counted
    }


@fact(1, 'Adam in host memory goes on with the step that was saved')
def step_is_not_reset(path):
    with model_parallel():
        first = start(**offload(1.0))
        first.train(3)
        first.save(path, 'dp_reshardable')
        second = start_warm(**offload(1.0))
        second.load(path)
    assert steps(second.optimizer) == {3}, f'step {steps(second.optimizer)} instead of 3'


def leaked_step(path):
    with model_parallel():
        whole = start(**offload(0.5))
        whole.train(3)
        save_with_leaked_steps(whole, path)
        losses = whole.train(3)
    with model_parallel(seed=4321):
        rest = start_warm(**offload(0.5))
        rest.load(path)
        found = rest.train(3)
    equal(optimizer_state(whole.optimizer), optimizer_state(rest.optimizer))
    assert losses == found


@fact(2, 'a checkpoint whose common state holds steps loads')
def leaked_step_on_one_rank(path):
    leaked_step(path)


@fact(13, 'also where ranks have lists of other lengths', ranks=2)
def leaked_step_on_two_ranks(path):
    leaked_step(path)


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


@fact(13, 'several buckets')
def several_buckets(path):
    for options in ({}, offload(0.5)):
        for sharding_type in FORMATS:
            name = f'{sharding_type}{len(options)}'
            resumed(path / name, sharding_type, bucket_size=3000, **options)


@fact(13, 'a parameter group that is empty on one of the ranks', ranks=2)
def empty_group_on_a_rank(path):
    # embedding and output layer, at the ends of the buffer, get a group of their own
    for index, options in enumerate(({}, offload(0.5), offload(1.0))):
        options = {'decoupled_lr': 1e-3, **options}
        with model_parallel():
            groups = start(**options).optimizer.param_groups
        empty = torch.tensor([any(not group['params'] for group in groups)], dtype=torch.int)
        torch.distributed.all_reduce(empty)
        assert empty == 1, f'{empty.item()} ranks have an empty group: one should'
        for sharding_type in FORMATS:
            resumed(path / f'{sharding_type}{index}', sharding_type, **options)


def main() -> int:
    """Print the table; 0 when every fact is as it should be, or the results went to a file."""
    parser = argparse.ArgumentParser(description='What becomes of the optimizer over a resume.')
    parser.add_argument('--results', type=Path, help='write the table as JSON')
    results_file = parser.parse_args().results
    logging.disable(logging.WARNING)
    rank = int(os.environ.get('RANK', '0'))
    scratch = shared_directory()
    results = {}
    try:
        for name, text, check in FACTS:
            try:
                check(scratch / name.replace(' ', '_'))
                results[name] = [True, text, '']
            except Exception as error:
                results[name] = [False, text, describe(error)]
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    if results_file:
        results_file.with_suffix(f'.{rank}').write_text(json.dumps(results))
    if rank == 0:
        print_table(results)
    return 0 if results_file or all(holds for holds, *_ in results.values()) else 1


def shared_directory() -> Path:
    """A new directory, the same on all ranks."""
    with model_parallel():
        path = [tempfile.mkdtemp()]
        torch.distributed.broadcast_object_list(path)
    return Path(path[0])


def describe(error: Exception) -> str:
    """One line; a message is made up of the place and the line for errors that have none."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error) or f'{frame.line} (in {frame.name})'
    return f'{type(error).__name__}: {message}'.split('\n')[0]


def print_table(results: dict) -> None:
    """One line a fact, under a line that says what was looked at."""
    import megatron.core

    overlay = 'stock' if os.environ.get('MEGATRON_OVERLAY') == '0' else 'with the overlay'
    adam = 'FusedAdam convention' if FUSED else 'torch AdamW'
    print(f'megatron-core {megatron.core.__version__} {overlay}, {adam}')
    for name, (holds, text, found) in results.items():
        number = name.split()[0]
        print(f'  {number:>2} {"as it should be" if holds else "WRONG":15}  {text}')
        if found:
            print(f'{"":22}{found[:160]}')


if __name__ == '__main__':
    sys.exit(main())
