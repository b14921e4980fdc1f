"""Entries of one layer as parts of tensors that have the layers along their first axis."""

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

from tests.unit_tests.dist_checkpointing.gpt_runs import sharded


def test_a_tensor_gets_the_layer_as_its_leading_axis():
    entry = sharded('k')
    entry = interop._prepend_gpt_layer_axis(entry, 1, 4)
    expected = ShardedTensor.from_rank_offsets('k', entry.data, (0, 1, 4), prepend_axis_num=1)
    assert (entry.global_shape, entry.global_offset, entry.axis_fragmentations) == (
        expected.global_shape,
        expected.global_offset,
        expected.axis_fragmentations,
    )
    assert entry.prepend_axis_num == 1
    entry.validate_metadata_integrity()


def test_an_object_gets_the_layer_axis_instead_of_its_placeholder():
    placeholder = interop._prepend_gpt_layer_axis(ShardedObject('k', None, (1,), (0,)), 2, 4)
    assert (placeholder.global_shape, placeholder.global_offset) == ((4,), (2,))
    expert = interop._prepend_gpt_layer_axis(ShardedObject('k', None, (8,), (3,)), 2, 4)
    assert (expert.global_shape, expert.global_offset) == ((4, 8), (2, 3))


def test_what_a_factory_builds_gets_the_layer_axis_however_deep():
    def build(key, data, replica_id, flattened_range):
        halves = data.chunk(2)
        return {'list': [sharded(key, (1, 3))], 'dict': {'w': sharded(key), 'v': halves[1]}}

    inner = ShardedTensorFactory('k', torch.randn(2, 3), build, lambda built: built)
    factory = interop._prepend_gpt_layer_axis(inner, 0, 2)
    built = factory.build()
    assert built['list'][0].global_shape == (2, 1, 3)
    assert built['dict']['w'].prepend_axis_num == 1
    assert isinstance(built['dict']['v'], torch.Tensor)
