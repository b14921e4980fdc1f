"""What the facts are made of: runs of a tiny model, and their comparison."""

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from tests.cpu_megatron.pretrain import prepare

warnings.simplefilter('ignore')
prepare(simulate_devices=True)

from tests.cpu_megatron.fused_adam_convention import found_in_transformer_engine  # noqa: E402
from tests.cpu_megatron.recorder import model_state, optimizer_state  # noqa: E402
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


def fact(number: int, text: str, when: bool = True):
    """Register a check; it raises where the fact doesn't hold."""

    def register(check: Callable[[Path], None]):
        if when:
            FACTS.append((f'{number} {check.__name__}', text, check))
        return check

    return register


def start(
    dtype: str = 'bf16',
    bucket_size: int | None = None,
    prepare_model: Callable[[torch.nn.Module], None] = lambda model: None,
    model: dict | None = None,
    **options,
):
    """A fresh model and optimizer in a fresh random state.

    Args:
        dtype: bf16, fp16 or fp32.
        prepare_model: changes the model before anything is built on it.
        model, options: settings of the model, and of the optimizer.
    """
    kind = {} if dtype == 'fp32' else {dtype: True}
    with found_in_transformer_engine() if FUSED else nullcontext():
        config = distributed_optimizer(**kind, **options)
    chunks = gpt(**kind, **(model or {}))
    for chunk in chunks:
        prepare_model(chunk)
    return Training.start(chunks, config, bucket_size=bucket_size)


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


def resumed(
    path: Path,
    sharding_type: str,
    before: int = 3,
    after: int = 3,
    around: Callable = nullcontext,
    **run,
):
    """Train ``before + after`` steps in one go and with a save and a load between; compare.

    Save and load are inside ``around()``.

    Returns:
        the run that saved and the one that loaded.

    Raises:
        AssertionError: a loss, a parameter, a moment or a step differs.
    """
    with model_parallel():
        whole = start(**run)
        whole.train(before)
        with around():
            whole.save(path, sharding_type)
        losses = whole.train(after)
    with model_parallel(seed=4321):
        rest = start_warm(**run)
        with around():
            rest.load(path)
        found = rest.train(after)
    equal(optimizer_state(whole.optimizer), optimizer_state(rest.optimizer))
    equal(model_state(whole.model), model_state(rest.model))
    assert losses == found, f'losses {found} instead of {losses}'
    return whole, rest


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


def resumed_with_leaked_step(path: Path) -> None:
    """As :func:`resumed`, offloading, from a checkpoint with steps in its common state."""
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
