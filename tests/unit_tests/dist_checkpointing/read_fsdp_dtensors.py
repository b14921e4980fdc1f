"""One rank that writes a GPT run's DTensors with DCP, and reads them under a hybrid run's names.

    python -m tests.unit_tests.dist_checkpointing.read_fsdp_dtensors DIRECTORY

Fails where a tensor isn't what it has to be.
"""

import hashlib
import pickle
import sys
from pathlib import Path

import torch
from torch.distributed import checkpoint
from torch.distributed.tensor import Shard, distribute_tensor

from tests import cpu_megatron
from tests.cpu_megatron.whole_checkpoint import gpt_source

PATTERN = 'M*-M*-'
MOMENTS = ('exp_avg', 'exp_avg_sq')


def main(directory):
    """One rank: write a GPT checkpoint with DCP, read it under the hybrid run's names."""
    cpu_megatron.install()
    cpu_megatron.activate_overlay()
    from tests.cpu_megatron.session import gpt, hybrid, model_parallel

    with model_parallel():
        mesh = torch.distributed.init_device_mesh('cpu', (2,))
        gpt_shapes = shapes(gpt(tied=False)[0])
        hybrid_shapes = shapes(hybrid(PATTERN, tied=False)[0])
        for chained in False, True:
            # As wrapping does, the runs differ in depth, and the optimizer's names in theirs.
            source = training_state(mesh, 'gpt', gpt_shapes, (1, 3), chained)
            target = training_state(mesh, 'hybrid', hybrid_shapes, (2, 2), chained)
            read_and_compare(source, target, f'{directory}/{chained}')
        read_incomplete(target['model'], f'{directory}/incomplete')


def shapes(model):
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def training_state(mesh, owner, parameters, depths, chained):
    """``model`` and ``optimizer`` as megatron hands them to DCP; every value is another one."""

    def tensor(name, key):
        digest = hashlib.sha256(f'{owner} {key}'.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4]))
        full = torch.randn(parameters[name], generator=generator)
        return distribute_tensor(full, mesh, [Shard(0)])

    def optimizer(names):
        wrapped = {'module.' * depths[1] + name: name for name in names}
        return {
            'state': {
                key: {moment: tensor(name, f'{name} {moment}') for moment in MOMENTS}
                for key, name in wrapped.items()
            },
            'param_to_group_meta': {
                key: {'lr': f'{owner} {name}', 'wd_mult': 1.0} for key, name in wrapped.items()
            },
        }

    attention = [name for name in parameters if 'self_attention' in name]
    others = [name for name in parameters if name not in attention]
    return {
        'model': {'module.' * depths[0] + name: tensor(name, name) for name in parameters},
        'optimizer': (
            {0: optimizer(attention), 1: optimizer(others)} if chained else optimizer(parameters)
        ),
    }


def read_and_compare(source, target, path):
    from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
        gpt_compatible_layer_maps,
        retarget_fsdp_state_dict_to_gpt_checkpoint,
    )

    layer_maps = gpt_compatible_layer_maps(PATTERN)
    checkpoint.save(source, checkpoint_id=path)
    reader = checkpoint.FileSystemReader(path)
    keys = reader.read_metadata().state_dict_metadata
    before = tensors_by_name(target)
    request = {
        place: retarget_fsdp_state_dict_to_gpt_checkpoint(
            target[place], layer_maps, [key for key in keys if key.startswith(f'{place}.')], place
        )
        for place in target
    }
    assert sum(1 for _ in leaves(request)) == len(keys)
    checkpoint.load(request, checkpoint_id=path)

    gpt, after = tensors_by_name(source), tensors_by_name(target)
    read = 0
    for kind, of_kind in after.items():
        for name, value in of_kind.items():
            expected = gpt_source(gpt[kind], name, PATTERN)
            assert torch.equal(value, before[kind][name] if expected is None else expected), name
            read += expected is not None
            assert expected is None or not torch.equal(before[kind][name], expected), name
    assert read == sum(len(of_kind) for of_kind in gpt.values())
    assert set(settings(request)) == set(settings(source))


def read_incomplete(model, path):
    """What no chunk of the checkpoint covers has to be missed after the load, on both ranks."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.read_record import DTensorLoadPlanner, recording_reads

    def read():
        with recording_reads({}) as record:
            checkpoint.load(model, checkpoint_id=path, planner=DTensorLoadPlanner())
        record.check()

    checkpoint.save(model, checkpoint_id=path)
    read()
    if torch.distributed.get_rank() == 0:
        file = Path(path, '.metadata')
        metadata = pickle.loads(file.read_bytes())
        key = min(key for key in model if key.endswith('linear_fc1.weight'))
        # The second rank's half.
        metadata.state_dict_metadata[key].chunks.pop()
        file.write_bytes(pickle.dumps(metadata))
    torch.distributed.barrier()
    try:
        read()
    except CheckpointingException as error:
        message = str(error)
    else:
        raise AssertionError('the missing chunk was not missed')
    if torch.distributed.get_rank() == 1:
        assert 'linear_fc1.weight (from [32, 0])' in message and '0 were read' in message, message
    else:
        assert message.startswith('Another rank'), message


def leaves(state):
    for value in state.values():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield value


def optimizers(state):
    optimizer = state['optimizer']
    if 'state' in optimizer:
        return [optimizer]
    # DCP puts what isn't a tensor below the integer as a string, after the ones that it read into.
    return list({int(index): part for index, part in optimizer.items()}.values())


def tensors_by_name(state):
    """Whole tensors by kind (parameter, moment) and name without wrappers; copies."""
    by_kind = {'parameter': state['model']} | {
        moment: {
            name: moments[moment]
            for optimizer in optimizers(state)
            for name, moments in optimizer['state'].items()
        }
        for moment in MOMENTS
    }
    return {
        kind: {
            name.replace('module.', ''): value.full_tensor().clone()
            for name, value in by_name.items()
        }
        for kind, by_name in by_kind.items()
    }


def settings(state):
    for optimizer in optimizers(state):
        for name, meta in optimizer['param_to_group_meta'].items():
            yield name, meta['lr'], meta['wd_mult']


if __name__ == '__main__':
    main(*sys.argv[1:])
