"""Real ``megatron.training`` runs for the converter's tests.

    torchrun … -m tests.unit_tests.tools.checkpoint.pp_vpp_runs RECORD KIND [megatron arguments]

What a run computed in its last step goes to RECORD (``-``: nowhere), a file a rank, under names
that don't depend on the layout: those of the model's own parameters, with Megatron's global layer
number.
"""

import os
import sys
from pathlib import Path

import torch

from tests.cpu_megatron import pretrain, warm

TINY = (
    '--hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --seq-length 8 '
    '--max-position-embeddings 8 --ckpt-format torch --clip-grad 1000'
).split()  # the gradient norm is computed, and changes no gradient


def run(nproc, *arguments, record=None, optimizer='torch_adam', kind='gpt'):
    """Train in ``nproc`` ranks and wait.

    Args:
        nproc: world size
        arguments: megatron's, each may hold several words
        record: directory that gets a file a rank with what the last step computed
        optimizer: 'torch_adam', or 'fused_adam' for its conventions
    """
    words = [word for argument in arguments for word in str(argument).split()]
    warm.run(
        nproc,
        'tests.unit_tests.tools.checkpoint.pp_vpp_runs',
        *(str(record or '-'), kind, *TINY, *words),
        env={'CPU_MEGATRON_OPTIMIZER': optimizer},
    )


def main():
    """See above."""
    record, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    pretrain.prepare(simulate_devices=False)
    _forbid_lenient_loading()
    if record != '-':
        _record(Path(record), int(os.environ['RANK']))
    pretrain.main(arguments)


def _forbid_lenient_loading():
    """Megatron loads again, leniently, what it can't load strictly; that must not pass here."""
    load_state_dict = torch.nn.Module.load_state_dict

    def strictly(self, state_dict, strict=True, **kwargs):
        assert strict, "the checkpoint doesn't load strictly"
        return load_state_dict(self, state_dict, strict, **kwargs)

    torch.nn.Module.load_state_dict = strictly


def _record(directory, rank):
    from megatron.training import training

    train_step, train = training.train_step, training.train
    last = {}

    def recorded_step(forward_step_func, data_iterator, model, *args, **kwargs):
        result = train_step(forward_step_func, data_iterator, model, *args, **kwargs)
        last['losses'] = {name: float(value) for name, value in result[0].items()}
        last['grad norm'] = result[5]
        last['grads'] = dict(_gradients(model))
        return result

    def recorded_train(forward_step_func, model, optimizer, *args, **kwargs):
        try:
            return train(forward_step_func, model, optimizer, *args, **kwargs)
        finally:
            directory.mkdir(exist_ok=True)
            torch.save({**last, 'state': dict(_state(model, optimizer))}, directory / f'{rank}.pt')

    training.train_step, training.train = recorded_step, recorded_train


def _global_names(model):
    """(name that every layout has, parameter) of each parameter of this rank."""
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_rank()
    ep = parallel_state.get_expert_model_parallel_rank()
    for chunk in model:
        module = chunk
        while hasattr(module, 'module'):
            module = module.module
        for name, param in module.named_parameters():
            if name.startswith('decoder.layers.'):
                _, _, local, rest = name.split('.', 3)
                number = module.decoder.layers[int(local)].layer_number - 1
                name = f'decoder.layers.{number}.{rest}'
            shard = f'tp{tp}.ep{ep}' if '.experts.' in name else f'tp{tp}'
            yield f'{shard}.{name}', param


def _gradients(model):
    for name, param in _global_names(model):
        yield name, param.main_grad.detach().clone()


def _state(model, optimizer):
    inner = {}
    for part in getattr(optimizer, 'chained_optimizers', [optimizer]):
        for group in part.optimizer.param_groups if part.optimizer else []:
            for param in group['params']:
                inner[id(param)] = (part.optimizer.state.get(param, {}), group)
    for name, param in _global_names(model):
        yield name, param.detach().clone()
        main = getattr(param, 'main_param', param)
        if main is not param:
            yield f'{name}/main', main.detach().clone()
        moments, group = inner[id(main)]
        for key, value in moments.items():
            yield f'{name}/{key}', torch.as_tensor(value).detach().clone()
        for key in ('lr', 'weight_decay', 'wd_mult', 'step'):
            if key in group:
                yield f'{name}/group {key}', torch.as_tensor(group[key]).clone()


def records(directory):
    """All ranks' records together: losses, gradient norm, gradients, final state.

    Returns:
        dict of (kind, name) to a value; tensors from ranks that hold the same thing (data parallel,
        tied embeddings apart) must agree
    """
    joined = {}
    for path in sorted(Path(directory).iterdir()):
        record = torch.load(path)
        for name, value in record['losses'].items():
            joined['loss', name] = value
        joined['grad norm', ''] = float(record['grad norm'])
        for kind in ('grads', 'state'):
            for name, value in record[kind].items():
                _put(joined, (kind, name), value)
    return joined


def _put(joined, key, value):
    assert key not in joined or torch.equal(joined[key], value), key
    joined[key] = value


def differences(one, other):
    """Keys whose values are not the same bit for bit, missing ones included."""
    return sorted(
        str(key)
        for key in one.keys() | other.keys()
        if key not in one
        or key not in other
        or (
            not (one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]))
            if isinstance(one[key], torch.Tensor)
            else one[key] != other[key]
        )
    )


if __name__ == '__main__':
    main()
