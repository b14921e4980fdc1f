"""Amends upstream's ``DistributedOptimizer``, so that what is loaded is what the next step uses.

``python -m megatron.core.optimizer.distrib_optimizer CHECKPOINT`` tells what resuming from a
checkpoint will do, and with ``--check-weights`` whether its optimizer state belongs to its weights;
``python PATH_OF_THIS_FILE CHECKPOINT`` does so from a checkout.
"""

import sys
from contextlib import contextmanager
from itertools import accumulate

if __name__ == '__main__':
    if not __package__:  # by its path, in a checkout
        sys.path[0] = __file__.rsplit('/megatron/', 1)[0]
    try:
        from megatron_overlay.tools.checkpoint.resume_report import main
    except ModuleNotFoundError:
        # In a checkout the tools are beside the overlay's package, not below it.
        from tools.checkpoint.resume_report import main

    raise SystemExit(main())

import torch

import megatron_overlay

upstream = megatron_overlay.upstream(__name__)

from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402
from megatron.core.optimizer.optimizer import groups_alike  # noqa: E402

HybridDeviceOptimizer = upstream.HybridDeviceOptimizer
_TorchAdam = (torch.optim.Adam, torch.optim.AdamW)


class DistributedOptimizer(upstream.DistributedOptimizer):  # type: ignore[name-defined]
    """Upstream's, with every part of the loaded state where the next step looks for it.

    ``step`` comes from the parameter groups and from nowhere else. Moments and main parameters are
    copied into the tensors that the optimizer has.

    A loading template is what :func:`dist_checkpointing.load` fills from a checkpoint. Entries
    that the checkpoint has no source for (the fresh layers of a hybrid model) come back from it as
    they went in, and are then copied over the optimizer's state. So they have to go in as they are.
    """

    @classmethod
    def _build_optimizer_group_ranges(cls, param_groups, gbuf_ranges):
        """Upstream's; a parameter's place is the one in its group, where fp32 ones come first.

        Upstream counts in the order of the buffers. In a group that has 16-bit parameters, too,
        state would be stored under the names of others, or not at all.
        """
        places, group_ranges = super()._build_optimizer_group_ranges(param_groups, gbuf_ranges)
        for group_index, group_range in enumerate(group_ranges):
            in_group = enumerate(_in_group(group_range['params']))
            places.update((param, (group_index, place)) for place, param in in_group)
        return places, group_ranges

    def _initialize_state(self) -> None:
        # What the first step allocates. Upstream would leave the moments uninitialised.
        if self.is_stub_optimizer or self.ddp_config.use_megatron_fsdp or self.optimizer.state:
            return
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            self.optimizer.dummy_step()
            return
        if self.config.use_precision_aware_optimizer:
            # As FusedAdam does it in its first step.
            remainders = self.config.store_param_remainders and self.config.bf16
            for group in self.optimizer.param_groups:
                for param in group['params']:
                    self.optimizer.initialize_state(param, remainders)
            return
        if self.init_state_fn is None:
            return
        self.init_state_fn(self.optimizer, self.config)
        if isinstance(self.optimizer, _TorchAdam):
            for state in self.optimizer.state.values():
                state['step'] = torch.tensor(0.0, dtype=torch.float32, device='cpu')

    def state_dict(self):
        """Upstream's; also of an optimizer that hasn't stepped, to be saved or loaded into."""
        self._initialize_state()
        with self._step_without_parameters():
            state_dict = super().state_dict()
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            for group in state_dict['optimizer']['param_groups']:
                for setting in self.optimizer.own_settings:
                    group.pop(setting, None)
        return state_dict

    @contextmanager
    def _step_without_parameters(self):
        """Inside, the optimizer has the step that upstream asks for, also without parameters.

        A rank's part of the buffers may be nothing but padding; what it says isn't stored.
        """
        has_none = (
            isinstance(self.optimizer, (*_TorchAdam, HybridDeviceOptimizer))
            and not self.optimizer.state
        )
        if has_none:
            step = torch.tensor(0.0, dtype=torch.float32, device='cpu')
            self.optimizer.state['no parameter'] = {'step': step}
        try:
            yield
        finally:
            if has_none:
                del self.optimizer.state['no parameter']

    def load_state_dict(self, state_dict):
        """Upstream's; afterwards each parameter counts its steps in a tensor of its own.

        Raises:
            CheckpointingException: the run has a group of parameters that no stored one is like.
        """
        stored_groups = []
        if self.optimizer is not None and not self.ddp_config.use_megatron_fsdp:
            own_groups = self.optimizer.param_groups
            stored_groups = groups_alike(own_groups, state_dict['optimizer']['param_groups'])
            for own, stored in zip(own_groups, stored_groups, strict=True):
                # The other Adam doesn't have all of this one's settings.
                for name in own.keys() - {'params', 'step'}:
                    stored.setdefault(name, own[name])
        super().load_state_dict(state_dict)
        if stored_groups:  # 0.18 takes one for all that are alike but for their rates
            for own, stored in zip(self.optimizer.param_groups, stored_groups, strict=True):
                own.update((key, stored[key]) for key in stored.keys() - {'params', 'step'})
        if isinstance(self.optimizer, _TorchAdam):
            for state in self.optimizer.state.values():
                if 'step' in state:
                    state['step'] = state['step'].clone()
            for group in self.optimizer.param_groups:
                group.pop('step', None)
        elif self.optimizer is not None:
            for group in self.optimizer.param_groups:
                if not group['params']:  # FusedAdam doesn't count there
                    group.pop('step', None)

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict, is_loading=False, metadata=None
    ):
        """Upstream's; a template holds this rank's shards of the live state instead of zeros.

        State that this rank has whole is read in place, without a copy in between.
        """
        with self._world_tensors_as_buffers_are():
            param_state = super().sharded_param_state_fully_reshardable(
                model_sharded_state_dict, is_loading, metadata
            )
        if is_loading:
            for index, model_param, param_range in self._params_in_model_space_order():
                live = self._get_main_param_and_optimizer_states(model_param)
                for key, entry in param_state[index].items():
                    state = live[key].detach()
                    if _is_whole(state, entry.data) and not _share_memory(state, model_param):
                        entry.data = state.view(entry.data.shape)
                    else:
                        shard = entry.data.view(-1)[param_range.start : param_range.end]
                        shard.copy_(state)
        return param_state

    @contextmanager
    def _world_tensors_as_buffers_are(self):
        # Upstream's own cut is right from 0.20 on; one that doesn't look at buckets can't be.
        cut = upstream.DistributedOptimizer.sharded_param_state_fully_reshardable
        self._keep_bucket_padding = 'buckets' not in cut.__code__.co_names
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
        keep_bucket_padding = getattr(self, '_keep_bucket_padding', False)
        if keep_bucket_padding and kwargs.get('empty_data'):
            return self._unwritten_world_tensors()
        state = super().get_parameter_state_dp_zero(*args, **kwargs)
        if state is not None and keep_bucket_padding:
            for index, buffer in enumerate(self.buffers):
                for world_tensors in state[index].values():
                    _insert_bucket_padding(world_tensors, buffer.buckets)
        return state

    def _unwritten_world_tensors(self):
        # Upstream fills them with zeros. Memory that nobody writes to costs nothing, and of what
        # is not read from the checkpoint only this rank's shards matter.
        keys = self._world_tensor_keys()
        return {
            index: {
                dtype: {
                    key: torch.empty(_size(buffer.buckets), dtype=torch.float32, device='cpu')
                    for key in keys
                }
                for dtype in self.gbuf_ranges[index]
            }
            for index, buffer in enumerate(self.buffers)
        }

    def _world_tensor_keys(self) -> tuple[str, ...]:
        return 'param', *getattr(self, 'optimizer_state_keys', ('exp_avg', 'exp_avg_sq'))

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

    def sharded_param_state_dp_reshardable(
        self, model_sharded_state_dict, is_loading=False, metadata=None
    ):
        """Upstream's; a template doesn't ask for ``step``, nor anyone for what has no element."""
        param_state = super().sharded_param_state_dp_reshardable(
            model_sharded_state_dict, is_loading, metadata
        )
        if is_loading:
            for tensors in self._bucket_entries(param_state):
                tensors.pop('step', None)
        for index, buckets in self._bucket_lists(param_state):
            for bucket in buckets:
                bucket[:] = [entry for entry in bucket if not _is_without_elements(entry)]
            # lists of different lengths would come back from a load
            buckets[:] = [
                bucket for number, bucket in enumerate(buckets) if self._has_part(index, number)
            ]
        return param_state

    def _has_part(self, index: int, bucket_index: int) -> bool:
        """Whether anything of the bucket, but for the padding at its end, is this rank's."""
        bucket = self.buffers[index].buckets[bucket_index]
        size = bucket.grad_data.numel() // self.data_parallel_group.size()
        return self.data_parallel_group.rank() * size < bucket.numel_unpadded

    def get_parameter_state_dp_reshardable(self):
        """Upstream's; a bucket in which this rank has no parameter has an entry of no elements.

        Upstream refuses such a bucket, and fills it up with padding like the entry that is there.
        """
        state = super().get_parameter_state_dp_reshardable()
        for _, buckets in self._bucket_lists(state):
            for bucket in buckets:
                if not bucket:
                    bucket.append(self._entry_without_elements())
        return state

    def _entry_without_elements(self) -> dict:
        config = self.config
        stored = {'exp_avg': config.exp_avg_dtype, 'exp_avg_sq': config.exp_avg_sq_dtype}
        dtypes = {key: stored.get(key, torch.float32) for key in self._world_tensor_keys()}
        if config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            remainders = config.store_param_remainders and config.bf16
            dtypes['param'] = torch.int16 if remainders else config.main_params_dtype
        device = torch.cuda.current_device()
        return {
            **{key: torch.empty(0, dtype=dtype, device=device) for key, dtype in dtypes.items()},
            'gbuf_local_start': 0,
            'gbuf_local_end': 0,
            'padding': True,
        }

    def load_parameter_state_from_dp_reshardable(self, state_dict):
        """Upstream's; entries that don't say whether they are padding are parameters."""
        for index, ranges_by_dtype in enumerate(self.gbuf_ranges):
            for dtype, ranges in ranges_by_dtype.items():
                loaded = state_dict.setdefault(index, {}).get(dtype, [])
                if len(loaded) < len(ranges):
                    own = iter(loaded)
                    state_dict[index][dtype] = [
                        next(own) if self._has_part(index, number) else []
                        for number in range(len(ranges))
                    ]
        for tensors in self._bucket_entries(state_dict):
            tensors.setdefault('padding', False)
        super().load_parameter_state_from_dp_reshardable(state_dict)
        self._settle_mixed_groups()
        self._hand_state_to_sub_optimizers()

    def load_parameter_state_from_dp_zero(self, *args, **kwargs):
        """Upstream's; sub-optimizers get the state as well."""
        super().load_parameter_state_from_dp_zero(*args, **kwargs)
        self._settle_mixed_groups()
        self._hand_state_to_sub_optimizers()

    def load_parameter_state_from_fully_reshardable(self, *args, **kwargs):
        """Upstream's; each parameter gets its own state in groups of mixed dtypes, too."""
        super().load_parameter_state_from_fully_reshardable(*args, **kwargs)
        self._settle_mixed_groups()

    def _settle_mixed_groups(self) -> None:
        """Give state to the parameters it is of, where stock stored it under names of others.

        That is what stock does with groups of 16-bit and fp32 parameters (see
        ``_build_optimizer_group_ranges``) if they are of one size. The weights, which are loaded
        by now, tell.

        Raises:
            CheckpointingException: the main parameters are those of other weights in both orders.
        """
        if len({buffer.param_dtype for buffer in self.buffers}) == 1 or self._all_ranks_fit():
            return
        for group_range in self.opt_group_ranges:
            named = group_range['params']
            states = [self._clone_of_state(param) for param in named]
            for param, state in zip(_in_group(named), states, strict=True):
                if state['param'].shape != self._clone_of_state(param)['param'].shape:
                    break
                self._set_main_param_and_optimizer_states(param, state)
        if not self._all_ranks_fit():
            raise CheckpointingException(
                'The main parameters of the checkpoint are not its weights in more precision: '
                'expected each under its own name. A megatron-core without this package stored '
                'those of bf16 and fp32 parameters in one group so. Load it in the layout that '
                'saved it, or pass --no-load-optim.'
            )

    def _all_ranks_fit(self) -> bool:
        """Whether :meth:`_main_params_fit` on all ranks of the group, which go one way."""
        device = torch.cuda.current_device()
        fit = torch.tensor(self._main_params_fit(), dtype=torch.int, device=device)
        torch.distributed.all_reduce(
            fit, op=torch.distributed.ReduceOp.MIN, group=self.data_parallel_group
        )
        return bool(fit)

    def _main_params_fit(self) -> bool:
        """Whether this rank's main parameters, rounded, are its shards of the 16-bit weights."""
        for param in self.model_param_group_index_map:
            if param.dtype in (torch.float16, torch.bfloat16):
                shard = self._get_model_param_range_map(param)['param']
                main_param = self._get_main_param_and_optimizer_states(param)['param']
                weights = param.detach().view(-1)[shard.start : shard.end]
                if not torch.equal(main_param.to(weights), weights):
                    return False
        return True

    def _clone_of_state(self, param):
        tensors = self._get_main_param_and_optimizer_states(param)
        return {key: value.detach().clone() for key, value in tensors.items()}

    def _hand_state_to_sub_optimizers(self) -> None:
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            self.optimizer._sync_hdo_state_to_sub_optimizers()

    def _bucket_entries(self, param_state):
        """Each parameter's and each padding's dict in a dp_reshardable state."""
        for _, buckets in self._bucket_lists(param_state):
            for bucket in buckets:
                yield from bucket

    def _bucket_lists(self, param_state):
        """For each buffer its index and the buckets of a dp_reshardable state."""
        for index in range(len(self.buffers)):
            for buckets in param_state[index].values():
                yield index, buckets

    def _get_main_param_and_optimizer_states(self, model_param):
        """Upstream's; the main parameter is there once, as ``param``."""
        tensors = super()._get_main_param_and_optimizer_states(model_param)
        tensors.pop('master_param', None)
        return tensors

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self, model_param, tensors):
        """Upstream's, but for ``step``, which ``load_state_dict`` restores from the groups.

        With a hybrid device optimizer values are copied into its tensors instead of replacing
        them: those are what its sub-optimizers hold, and nothing of the loaded state stays behind.
        """
        tensors = {**tensors, 'step': None}
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            live = self._get_main_param_and_optimizer_states(model_param)
            for key, value in live.items():
                if isinstance(tensors.get(key), torch.Tensor):
                    tensors[key] = value.copy_(tensors[key])
            tensors['master_param'] = None
            self._set_inner_param(model_param, live['param'])
        super()._set_main_param_and_optimizer_states(model_param, tensors)

    @torch.no_grad()
    def _copy_model_params_to_main_params(self, *args, **kwargs):
        """Upstream's, also for main parameters that a hybrid device optimizer steps."""
        offloading = isinstance(self.optimizer, HybridDeviceOptimizer)
        if offloading and not self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            for model_param, (group, order) in self.model_param_group_index_map.items():
                shard = self._get_model_param_range_map(model_param)['param']
                main_param = self.optimizer.param_groups[group]['params'][order]
                main_param.copy_(model_param.view(-1)[shard.start : shard.end])
        super()._copy_model_params_to_main_params(*args, **kwargs)

    def _set_inner_param(self, model_param, main_param: torch.Tensor) -> None:
        group, order = self.model_param_group_index_map[model_param]
        param = self.optimizer.param_groups[group]['params'][order]
        inner_param = self.optimizer.param_to_inner_param[param]
        if inner_param is not main_param:
            inner_param.copy_(main_param)


def _in_group(params: list) -> list:
    """Parameters that stand as in their buffers, as they stand in their optimizer's group."""
    return sorted(params, key=lambda param: param.dtype != torch.float32)


def _insert_bucket_padding(world_tensors: dict, buckets: list) -> None:
    """Move each bucket's elements from where they stand without padding to the bucket's offset."""
    sizes = [bucket.numel_unpadded for bucket in buckets]
    starts = list(accumulate(sizes, initial=0))[:-1]
    if all(bucket.offset == start for bucket, start in zip(buckets, starts, strict=True)):
        return
    for key, packed in world_tensors.items():
        if not isinstance(packed, torch.Tensor):
            continue
        spread = packed.new_zeros(_size(buckets))
        for bucket, start, size in zip(buckets, starts, sizes, strict=True):
            spread[bucket.offset : bucket.offset + size] = packed[start : start + size]
        world_tensors[key] = spread


def _is_without_elements(entry: dict) -> bool:
    tensors = [value for value in entry.values() if isinstance(value, ShardedTensor)]
    return all(0 in tensor.local_shape for tensor in tensors)


def _size(buckets: list) -> int:
    return buckets[-1].offset + buckets[-1].numel_unpadded


def _is_whole(state: torch.Tensor, template: torch.Tensor) -> bool:
    return (state.numel(), state.dtype, state.device) == (
        template.numel(),
        template.dtype,
        template.device,
    )


def _share_memory(state: torch.Tensor, model_param: torch.Tensor) -> bool:
    # A main parameter in fp32 is a view of the model's, which is read by itself.
    return state.untyped_storage().data_ptr() == model_param.untyped_storage().data_ptr()
