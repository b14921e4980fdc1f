"""What a run computed, bit for bit: losses and gradient norms, and all its state at the end."""

import json
from pathlib import Path
from typing import Any

import torch

_log = None


def _line(iteration: int, losses: dict, grad_norm: float | None) -> str:
    record = {'iteration': iteration}
    for name, value in losses.items():
        record[name] = float(value).hex()
    record['grad norm'] = None if grad_norm is None else float(grad_norm).hex()
    return json.dumps(record) + '\n'


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


def model_state(model) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of all chunks; keys ``<chunk>.<name>``, values copies."""
    return {
        f'{chunk}.{name}': value.detach().clone()
        for chunk, module in enumerate(model)
        for name, value in module.state_dict_for_save_checkpoint().items()
        if isinstance(value, torch.Tensor)
    }


def install(training, log: str | None, dump: str | None) -> None:
    """Record every ``train_step`` of ``megatron.training.training``, and the end of its loop."""
    global _log
    train_step, train = training.train_step, training.train

    def recorded_step(forward_step_func, data_iterator, model, *args, **kwargs):
        global _log
        result = train_step(forward_step_func, data_iterator, model, *args, **kwargs)
        losses, grad_norm = result[0], result[5]
        if log and losses and _log is None and _writes_log():
            _log = open(log, 'w')  # noqa: SIM115
        if _log is not None:
            _log.write(_line(training.get_args().curr_iteration + 1, losses, grad_norm))
            _log.flush()
        return result

    def recorded_train(forward_step_func, model, optimizer, *args, **kwargs):
        try:
            return train(forward_step_func, model, optimizer, *args, **kwargs)
        finally:
            if dump:
                path = f'{dump}.{torch.distributed.get_rank()}'
                torch.save(
                    {'model': model_state(model), 'optimizer': optimizer_state(optimizer)}, path
                )

    training.train_step, training.train = recorded_step, recorded_train


def _writes_log() -> bool:
    from megatron.core import parallel_state

    return (
        parallel_state.get_data_parallel_rank() == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


def close() -> None:
    """Close the log."""
    global _log
    if _log is not None:
        _log.close()
        _log = None
