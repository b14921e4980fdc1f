"""What a run computed, bit for bit: losses and gradient norms, and all its state at the end."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch


@dataclass
class Record:
    """One run on one rank.

    Attributes:
        steps: for each iteration its number, ``grad norm``, and on the last pipeline stage
            ``lm loss``.
        model: parameters and buffers after the last iteration.
        optimizer: every tensor and number of the inner optimizers after the last iteration.
        loaded: this rank's shards of the distributed optimizer before the first iteration.
        trained: the same after the last one.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    loaded: dict[str, tuple[int, torch.Tensor]] = field(default_factory=dict)
    trained: dict[str, tuple[int, torch.Tensor]] = field(default_factory=dict)


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a log, losses and gradient norms as the floats they were."""
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    for record in records:
        for name, value in record.items():
            if isinstance(value, str):
                record[name] = float.fromhex(value)
    return records


def optimizer_state(optimizer) -> dict[str, torch.Tensor]:
    """Every tensor and number of the inner optimizers: main parameters, moments, steps.

    Returns:
        keys ``<optimizer>.<group>.<parameter>.<name>``, and ``<optimizer>.<group>.step`` where the
        step is in the group; values are copies.
    """
    state = {}
    for index, part in enumerate(getattr(optimizer, 'chained_optimizers', [optimizer])):
        inner = part.optimizer
        if inner is None:
            continue
        for g, group in enumerate(inner.param_groups):
            if 'step' in group:
                state[f'{index}.{g}.step'] = torch.as_tensor(group['step']).clone()
            for p, param in enumerate(group['params']):
                prefix = f'{index}.{g}.{p}'
                state[f'{prefix}.param'] = param.detach().clone()
                for name, value in inner.state.get(param, {}).items():
                    if value is not None:
                        state[f'{prefix}.{name}'] = torch.as_tensor(value).detach().clone()
    return state


def optimizer_shards(optimizer) -> dict[str, tuple[int, torch.Tensor]]:
    """What the distributed optimizer keeps for each of this rank's parameters.

    Returns:
        keys ``<parameter>.<state>``, after ``<chunk>.`` if there are several; where in the
        flattened parameter the shard begins, and a copy of it. ``param`` is the main parameter,
        ``inner`` what a hybrid device optimizer steps.
    """
    shards = {}
    for part in getattr(optimizer, 'chained_optimizers', [optimizer]):
        names = _parameter_names(getattr(part, 'model_chunks', []))
        for model_param, (group, order) in getattr(part, 'model_param_group_index_map', {}).items():
            name = names[model_param]
            start = part._get_model_param_range_map(model_param)['param'].start
            param = part.optimizer.param_groups[group]['params'][order]
            values = {'param': param, **part.optimizer.state.get(param, {})}
            if hasattr(part.optimizer, 'param_to_inner_param'):
                values['inner'] = part.optimizer.param_to_inner_param[param]
            for state, value in values.items():
                if isinstance(value, torch.Tensor):
                    shards[f'{name}.{state}'] = (start, value.detach().clone())
    return shards


def _parameter_names(chunks) -> dict[torch.nn.Parameter, str]:
    return {
        parameter: f'{index}.{name}' if len(chunks) > 1 else name
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def model_state(model) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of all chunks; keys ``<chunk>.<name>``, values copies."""
    return {
        f'{chunk}.{name}': value.detach().clone()
        for chunk, module in enumerate(model)
        for name, value in module.state_dict_for_save_checkpoint().items()
        if isinstance(value, torch.Tensor)
    }


@contextmanager
def recording(training, log: str | Path | None = None) -> Iterator[Record]:
    """Record the runs of ``megatron.training.training`` (the module given) inside the block.

    Args:
        training: the module.
        log: file that gets one JSON line an iteration, from the first data- and tensor-parallel
            rank of the last pipeline stage.
    """
    record = Record()
    train_step, train = training.train_step, training.train

    def recorded_step(*args, **kwargs):
        result = train_step(*args, **kwargs)
        losses, grad_norm = result[0], result[5]
        step = {'iteration': training.get_args().curr_iteration + 1}
        step |= {name: float(value) for name, value in losses.items()}
        record.steps.append(step | {'grad norm': None if grad_norm is None else float(grad_norm)})
        if log and losses and _writes_log():
            Path(log).write_text(''.join(_line(step) for step in record.steps))
        return result

    def recorded_train(forward_step_func, model, optimizer, *args, **kwargs):
        record.loaded = optimizer_shards(optimizer)
        try:
            return train(forward_step_func, model, optimizer, *args, **kwargs)
        finally:
            record.model, record.optimizer = model_state(model), optimizer_state(optimizer)
            record.trained = optimizer_shards(optimizer)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(training, 'train_step', recorded_step))
        stack.enter_context(mock.patch.object(training, 'train', recorded_train))
        yield record


def _line(step: dict[str, Any]) -> str:
    exact = {
        name: value.hex() if isinstance(value, float) else value for name, value in step.items()
    }
    return json.dumps(exact) + '\n'


def _writes_log() -> bool:
    from megatron.core import parallel_state

    return (
        parallel_state.get_data_parallel_rank() == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
