"""Amends upstream's ``DistributedOptimizer``, so that what is loaded is what the next step uses."""

from contextlib import contextmanager
from itertools import accumulate

import torch

import megatron_overlay

upstream = megatron_overlay.upstream(__name__)


class DistributedOptimizer(upstream.DistributedOptimizer):
    """Upstream's, with templates for loading that hold the live state.

    A loading template is what :func:`dist_checkpointing.load` fills from a checkpoint. Entries
    that the checkpoint has no source for (the fresh layers of a hybrid model) come back from it as
    they went in, and are then copied over the optimizer's state. So they have to go in as they are.
    """

    def sharded_state_dict(self, model_sharded_state_dict=None, is_loading=False, *args, **kwargs):
        """Upstream's; an optimizer that hasn't stepped yet can also be asked for its template."""
        if is_loading:
            self._initialize_torch_adam_state()
        return super().sharded_state_dict(
            {} if model_sharded_state_dict is None else model_sharded_state_dict,
            is_loading,
            *args,
            **kwargs,
        )

    def _initialize_torch_adam_state(self) -> None:
        # What torch allocates in the first step. Upstream would leave the moments uninitialised.
        if not isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            return
        for group in self.optimizer.param_groups:
            for param in group['params']:
                state = self.optimizer.state[param]
                if not state:
                    state['step'] = torch.tensor(0.0)
                    state['exp_avg'] = torch.zeros_like(param)
                    state['exp_avg_sq'] = torch.zeros_like(param)

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict, is_loading=False, metadata=None
    ):
        """Upstream's; a template holds this rank's shards of the live state instead of zeros."""
        with self._world_tensors_as_buffers_are():
            param_state = super().sharded_param_state_fully_reshardable(
                model_sharded_state_dict, is_loading, metadata
            )
        if is_loading:
            for index, model_param, param_range in self._params_in_model_space_order():
                live = self._get_main_param_and_optimizer_states(model_param)
                for key, entry in param_state[index].items():
                    shard = entry.data.view(-1)[param_range.start : param_range.end]
                    shard.copy_(live[key].detach())
        return param_state

    @contextmanager
    def _world_tensors_as_buffers_are(self):
        self._keep_bucket_padding = True
        try:
            yield
        finally:
            del self._keep_bucket_padding

    def get_parameter_state_dp_zero(self, *args, **kwargs):
        """Upstream's; for the fully reshardable format, buckets stand at their buffer offsets.

        Upstream drops the padding between buckets from these tensors, and then cuts them at
        offsets that count it: from the second bucket on, parameters would get their neighbours'
        values as soon as a bucket doesn't end on a multiple of the padding.
        """
        state = super().get_parameter_state_dp_zero(*args, **kwargs)
        if state is not None and getattr(self, '_keep_bucket_padding', False):
            for index, buffer in enumerate(self.buffers):
                for world_tensors in state[index].values():
                    _insert_bucket_padding(world_tensors, buffer.buckets)
        return state

    def _params_in_model_space_order(self):
        """Index in the fully reshardable state, parameter, and this rank's range in it."""
        index = -1
        for buffer, ranges_by_dtype in zip(self.buffers, self.gbuf_ranges, strict=True):
            for bucket_ranges in ranges_by_dtype.values():
                local = {
                    param: ranges['param']
                    for bucket in bucket_ranges
                    for param, ranges in bucket['param_map'].items()
                }
                for param in buffer.param_index_map:
                    index += 1
                    if param in local:
                        yield index, param, local[param]

    def _set_main_param_and_optimizer_states(self, model_param, tensors):
        """Upstream's, but for ``step``, which ``load_state_dict`` restores from the groups."""
        super()._set_main_param_and_optimizer_states(model_param, {**tensors, 'step': None})


def _insert_bucket_padding(world_tensors: dict, buckets: list) -> None:
    """Move each bucket's elements from where they stand without padding to the bucket's offset."""
    sizes = [bucket.numel_unpadded for bucket in buckets]
    starts = list(accumulate(sizes, initial=0))[:-1]
    if all(bucket.offset == start for bucket, start in zip(buckets, starts, strict=True)):
        return
    for key, packed in world_tensors.items():
        if not isinstance(packed, torch.Tensor):
            continue
        spread = packed.new_zeros(buckets[-1].offset + sizes[-1])
        for bucket, start, size in zip(buckets, starts, sizes, strict=True):
            spread[bucket.offset : bucket.offset + size] = packed[start : start + size]
        world_tensors[key] = spread
