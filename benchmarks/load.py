"""Loading a GPT checkpoint into a hybrid run, over loading it into the GPT run that saved it.

    python benchmarks/load.py

Both are megatron's own ``load_checkpoint`` with model, optimizer, scheduler and random state, each
in processes that take turns. The first load of a process also allocates the optimizer's state, for
all the layers that a model has; the later ones find it there, and the least of them counts. A model
with Mamba layers has more of everything that a load goes through; so each hybrid model also loads a
checkpoint of its own, the other reference. Then retargeting alone, on 100 000 entries.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron_overlay
from tests.cpu_megatron.torchrun import torchrun

ENTRIES = 100_000


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=3, help='processes a kind (%(default)s)')
    parser.add_argument('--loads', type=int, default=10, help='loads in each process (%(default)s)')
    parser.add_argument('--layers', type=int, default=4, help='GPT layers (%(default)s)')
    parser.add_argument('--hidden-size', type=int, default=768, help='(%(default)s)')
    parser.add_argument('--directory', default='/dev/shm', help='for the checkpoint (%(default)s)')
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix='benchmark_load_', dir=options.directory)
    try:
        print_loads(options, directory)
    finally:
        shutil.rmtree(directory)
    print_retargeting()
    return 0


def print_loads(options, directory: str) -> None:
    """Save the checkpoints and load them in turns."""
    common = [
        *('--ckpt-format', 'torch_dist', '--use-distributed-optimizer'),
        *('--dist-ckpt-optim-fully-reshardable', '--bf16'),
        f'--hidden-size={options.hidden_size}',
        f'--ffn-hidden-size={4 * options.hidden_size}',
    ]
    models = {'GPT': ['gpt', *common, f'--num-layers={options.layers}']}
    for pattern in '*-' * options.layers, 'M*-' * options.layers:
        models[f'hybrid `{pattern}`'] = [
            *('hybrid', *common, f'--hybrid-layer-pattern={pattern}', '--mamba-head-dim=64')
        ]
    folders = {model: f'{directory}/{number}' for number, model in enumerate(models)}
    for model, arguments in models.items():
        save = ['--exit-interval=1', f'--save={folders[model]}']
        torchrun(1, 'tests.cpu_megatron.pretrain', *arguments, *save)
    # (the model, the model that saved the checkpoint): a model's own comes after GPT's
    measured = {(model, source): [] for model in models for source in dict.fromkeys(['GPT', model])}
    for _ in range(options.rounds):
        for (model, source), processes in measured.items():
            processes.append(loads(options.loads, models[model], folders[source]))
    size = sum(file.stat().st_size for file in Path(folders['GPT']).rglob('*.distcp')) / 2**20
    print(f'\n{size:.0f} MiB checkpoint, {options.rounds} processes of {options.loads} loads each')
    print(
        '| GPT checkpoint into | load, s | processor, s | processor, over GPT into GPT '
        '| over its own into itself | first load, s | peak, MiB | held after it | ratio |'
    )
    print('|---|---|---|---|---|---|---|---|---|')
    for model in models:
        processes = measured[model, 'GPT']
        first = [process[0] for process in processes]
        processor = later(processes, 'processor')
        over_gpt, over_own = (
            processor / later(measured[reference], 'processor')
            for reference in (('GPT', 'GPT'), (model, model))
        )
        peak, held = median(first, 'peak'), median(first, 'held')
        print(
            f'| {model} | {later(processes, "s"):.3f} | {processor:.3f} | {over_gpt:.3f} '
            f'| {over_own:.3f} | {median(first, "s"):.3f} | {peak:.0f} | {held:.0f} '
            f'| {peak / held:.3f} |'
        )


def later(processes: list[list[dict]], key: str) -> float:
    """The least of all loads after a process's first: what else ran on the machine only adds."""
    return min(load[key] for process in processes for load in process[1:])


def median(measured: list[dict], key: str) -> float:
    """Of one figure over some loads."""
    return statistics.median(load[key] for load in measured)


def loads(number: int, arguments: list[str], directory: str) -> list[dict]:
    """What one process measured."""
    run = torchrun(1, 'benchmarks.timed_load', str(number), *arguments, f'--load={directory}')
    lines = [line.partition('LOAD ')[2] for line in run.stdout.splitlines() if 'LOAD ' in line]
    return [json.loads(line) for line in lines]


def print_retargeting() -> None:
    """Retarget 100 000 entries of each kind."""
    megatron_overlay.activate()
    import torch
    from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
        gpt_compatible_layer_maps,
        retarget_fsdp_state_dict_to_gpt_checkpoint,
        retarget_sharded_state_dict_to_gpt_checkpoint,
    )
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    layers = 100
    maps = gpt_compatible_layer_maps('M*-' * layers)
    weights = [
        (hybrid, gpt, f'{block}.linear_{number}.weight')
        for gpt in range(layers)
        for hybrid, block in ((3 * gpt + 1, 'self_attention'), (3 * gpt + 2, 'mlp'))
        for number in range(ENTRIES // layers // 2)
    ]
    value = torch.zeros(1)

    def torch_dist():
        keys = [f'decoder.layers.{hybrid}.{name}' for hybrid, _, name in weights]
        state = {key: ShardedTensor.from_rank_offsets(key, value) for key in keys}
        return lambda: retarget_sharded_state_dict_to_gpt_checkpoint(state, maps)

    def fsdp_model():
        names = [f'module.decoder.layers.{hybrid}.{name}' for hybrid, _, name in weights]
        state = dict.fromkeys(names, value)
        keys = [f'model.module.module.decoder.layers.{gpt}.{name}' for _, gpt, name in weights]
        return lambda: retarget_fsdp_state_dict_to_gpt_checkpoint(state, maps, keys, 'model')

    def fsdp_optimizer():
        half = weights[::2]
        names = [f'module.decoder.layers.{hybrid}.{name}' for hybrid, _, name in half]
        moments = ('exp_avg', 'exp_avg_sq')
        state = {'state': {name: dict.fromkeys(moments, value) for name in names}}
        keys = [
            f'optimizer.state.module.decoder.layers.{gpt}.{name}.{moment}'
            for _, gpt, name in half
            for moment in moments
        ]
        return lambda: retarget_fsdp_state_dict_to_gpt_checkpoint(state, maps, keys, 'optimizer')

    print(f'\n| retargeting {ENTRIES} entries | median of 5, s |')
    print('|---|---|')
    for label, prepare in (
        ('`torch_dist`', torch_dist),
        ('`fsdp_dtensor`, model', fsdp_model),
        ('`fsdp_dtensor`, optimizer', fsdp_optimizer),
    ):
        print(f'| {label} | {statistics.median(seconds(prepare()) for _ in range(5)):.2f} |')


def seconds(call) -> float:
    """Time that the call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == '__main__':
    sys.exit(main())
