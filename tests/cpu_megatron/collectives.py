"""``torch.distributed`` over gloo for code that asks for NCCL."""

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.cpu_megatron.facade import on_cpu


def _over_gloo(create):
    @functools.wraps(create)
    def over_gloo(*args, **kwargs):
        if create.__name__ == 'init_process_group':
            args, kwargs = args[1:], kwargs | {'backend': 'gloo'}
        elif kwargs.get('backend') is not None:
            kwargs['backend'] = 'gloo'
        for nccl_only in ('device_id', 'pg_options'):
            kwargs.pop(nccl_only, None)
        return create(*args, **kwargs)

    return over_gloo


def _one_group_for_the_same_ranks(new_group, destroy_process_group):
    # Each group of gloo has threads that poll, and a model's backward hooks keep its groups for
    # ever: with dozens a run, some runs in one process are busy with nothing else.
    groups: dict = {}

    @functools.wraps(new_group)
    def shared_group(ranks=None, *args, **kwargs):
        key = None if ranks is None else tuple(ranks)
        if key not in groups:
            groups[key] = new_group(ranks, *args, **kwargs)
        return groups[key]

    @functools.wraps(destroy_process_group)
    def destroy_all_or_none(group=None):
        if group is None or group is dist.group.WORLD:
            groups.clear()
            destroy_process_group(group)

    return shared_group, destroy_all_or_none


def install() -> None:
    """Groups and meshes are made with gloo; collectives get the arguments that gloo takes."""
    barrier, all_to_all_single, all_reduce = dist.barrier, dist.all_to_all_single, dist.all_reduce

    @functools.wraps(barrier)
    def barrier_without_devices(group=None, async_op=False, device_ids=None):
        return barrier(group=group, async_op=async_op)

    @functools.wraps(all_to_all_single)
    def all_to_all_with_lists(
        output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        as_list = [
            None if sizes is None else [int(size) for size in sizes]
            for sizes in (output_split_sizes, input_split_sizes)
        ]
        return all_to_all_single(output, input, *as_list, group=group, async_op=async_op)

    @functools.wraps(all_reduce)
    def all_reduce_with_mean(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if op != dist.ReduceOp.AVG or async_op:
            return all_reduce(tensor, op, group, async_op)
        all_reduce(tensor, dist.ReduceOp.SUM, group)  # older gloo has no mean (torch 2.6, 2.7)
        tensor /= dist.get_world_size(group)

    new_group, destroy_process_group = _one_group_for_the_same_ranks(
        _over_gloo(dist.new_group), dist.destroy_process_group
    )
    replaced = {
        'init_process_group': _over_gloo(dist.init_process_group),
        'new_group': new_group,
        'destroy_process_group': destroy_process_group,
        'barrier': barrier_without_devices,
        'all_to_all_single': all_to_all_with_lists,
        'all_reduce': all_reduce_with_mean,
    }
    for name, value in replaced.items():
        setattr(dist, name, value)
        setattr(dist.distributed_c10d, name, value)
    make_mesh, mesh_of_groups = DeviceMesh.__init__, DeviceMesh.from_group

    @functools.wraps(make_mesh)
    def mesh_on_cpu(self, device_type, *args, **kwargs):
        make_mesh(self, on_cpu(device_type), *args, **kwargs)

    @functools.wraps(mesh_of_groups)
    def mesh_of_groups_on_cpu(group, device_type, *args, **kwargs):
        return mesh_of_groups(group, on_cpu(device_type), *args, **kwargs)

    DeviceMesh.__init__ = mesh_on_cpu
    DeviceMesh.from_group = staticmethod(mesh_of_groups_on_cpu)
