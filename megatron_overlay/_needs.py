"""What each of the overlay's modules needs of upstream.

Written by ``python -m tests.unit_tests.overlay.needs`` from the modules themselves.

    extends: it runs upstream's module of its name.
    overlay: the overlay's modules that it can't do without; `.name` is in its own package.
    names: upstream's module -> what it imports from there, or uses of it.
    methods, attributes: upstream's class -> what it calls by `super()`, or uses of `self`.
    functions: functions and methods that can go in front of upstream's, with their parameters.
"""

# ruff: noqa: E501
# fmt: off
NEEDS: dict[str, dict] = {
    'megatron.core.dist_checkpointing.checkpoint_keys': {},
    'megatron.core.dist_checkpointing.checkpoint_layout': {
        'overlay': ['.checkpoint_keys', '.format_names', '.key_arguments', '.read_record'],
        'names': {
            'megatron.core.dist_checkpointing.dict_utils': ['nested_values'],
            'megatron.core.dist_checkpointing.mapping': [
                'ShardedStateDict', 'ShardedTensor', 'ShardedTensorFactory',
            ],
            'megatron.core.dist_checkpointing.strategies.torch': ['_get_filesystem_reader'],
        },
    },
    'megatron.core.dist_checkpointing.explicit_names': {'overlay': ['.checkpoint_keys']},
    'megatron.core.dist_checkpointing.format_names': {},
    'megatron.core.dist_checkpointing.fsdp_mixers': {
        'overlay': ['.format_names', '.optimizer_load', '.stored_checkpoint'],
    },
    'megatron.core.dist_checkpointing.gpt_checkpoint_interop': {
        'overlay': [
            '.checkpoint_keys', '.explicit_names', '.gpt_layer_maps', '.key_arguments',
            '.layer_axis', '.mamba_from_attention',
        ],
        'names': {
            'megatron.core.dist_checkpointing.dict_utils': ['dict_list_map_inplace'],
            'megatron.core.dist_checkpointing.mapping': [
                'LocalNonpersistentObject', 'ShardedBase', 'ShardedStateDict',
                'ShardedTensorFactory',
            ],
        },
    },
    'megatron.core.dist_checkpointing.gpt_layer_maps': {
        'overlay': ['.checkpoint_keys', '.checkpoint_layout', '.pattern_symbols'],
    },
    'megatron.core.dist_checkpointing.hybrid_checkpoint_interop': {
        'overlay': [
            '.checkpoint_keys', '.checkpoint_layout', '.gpt_checkpoint_interop', '.gpt_layer_maps',
            '.layer_axis',
        ],
        'names': {
            'megatron.core.dist_checkpointing.dict_utils': ['dict_list_map_inplace'],
            'megatron.core.dist_checkpointing.mapping': ['ShardedBase', 'ShardedStateDict'],
        },
    },
    'megatron.core.dist_checkpointing.key_arguments': {'overlay': ['.checkpoint_keys']},
    'megatron.core.dist_checkpointing.layer_axis': {
        'names': {
            'megatron.core.dist_checkpointing.dict_utils': [
                'dict_list_map_inplace', 'nested_values',
            ],
            'megatron.core.dist_checkpointing.mapping': [
                'ShardedBase', 'ShardedObject', 'ShardedTensor', 'ShardedTensorFactory',
            ],
        },
    },
    'megatron.core.dist_checkpointing.leaked_state': {
        'overlay': ['.checkpoint_keys', '.format_names'],
    },
    'megatron.core.dist_checkpointing.load_plan': {
        'overlay': [
            '.checkpoint_layout', '.format_names', '.fsdp_mixers', '.gpt_checkpoint_interop',
            '.hybrid_checkpoint_interop', '.key_arguments', '.mamba_from_attention',
            '.optimizer_load', '.saved_arguments', '.stored_checkpoint',
        ],
    },
    'megatron.core.dist_checkpointing.mamba_from_attention': {
        'overlay': [
            '.checkpoint_keys', '.checkpoint_layout', '.gpt_layer_maps', '.pattern_symbols',
        ],
        'names': {
            'megatron.core.dist_checkpointing.mapping': ['ShardedTensor', 'ShardedTensorFactory'],
        },
    },
    'megatron.core.dist_checkpointing.optimizer_load': {
        'overlay': ['.format_names', '.stored_checkpoint', '.unstored_state'],
    },
    'megatron.core.dist_checkpointing.pattern_symbols': {},
    'megatron.core.dist_checkpointing.read_record': {},
    'megatron.core.dist_checkpointing.saved_arguments': {
        'overlay': ['.checkpoint_layout', '.format_names', '.hybrid_checkpoint_interop'],
    },
    'megatron.core.dist_checkpointing.serialization': {
        'extends': True,
        'overlay': ['.leaked_state'],
        'names': {
            'megatron.core.dist_checkpointing.dict_utils': ['nested_values'],
            'megatron.core.dist_checkpointing.mapping': ['ShardedTensor'],
            'megatron.core.dist_checkpointing.serialization': [
                'load_common', 'load_common_state_dict', 'save',
            ],
        },
        'functions': [
            '_is_whole_host_tensor(data)', '_without_leaked_state(load, checkpoint_dir)',
            'load_common(checkpoint_dir)', 'load_common_state_dict(checkpoint_dir)',
            'save(sharded_state_dict, *args, **kwargs)',
        ],
    },
    'megatron.core.dist_checkpointing.stored_checkpoint': {
        'overlay': ['.checkpoint_keys', '.checkpoint_layout', '.format_names', '.saved_arguments'],
    },
    'megatron.core.dist_checkpointing.strategies.torch': {
        'extends': True,
        'overlay': ['megatron.core.dist_checkpointing.read_record'],
        'names': {'megatron.core.dist_checkpointing.strategies.torch': ['MCoreLoadPlanner']},
        'methods': {'MCoreLoadPlanner': []},
        'attributes': {'MCoreLoadPlanner': []},
    },
    'megatron.core.dist_checkpointing.unstored_state': {
        'overlay': ['.checkpoint_keys', '.format_names', '.stored_checkpoint'],
    },
    'megatron.core.dist_checkpointing.validation': {
        'extends': True,
        'overlay': ['.checkpoint_keys'],
        'names': {
            'megatron.core.dist_checkpointing.core': ['CheckpointingException'],
            'megatron.core.dist_checkpointing.mapping': ['ShardedTensor'],
            'megatron.core.dist_checkpointing.validation': ['validate_sharding_integrity'],
        },
        'functions': [
            '_described(weight, places)', 'partial_state(shards)', 'reading_parts(is_partly_read)',
            'validate_sharding_integrity(global_metadata, common_state_dict=)',
        ],
    },
    'megatron.core.optimizer.cpu_offloading.hybrid_optimizer': {
        'extends': True,
        'overlay': ['megatron.core.optimizer.distrib_optimizer'],
        'names': {
            'megatron.core.optimizer.cpu_offloading.hybrid_optimizer': ['HybridDeviceOptimizer'],
        },
        'methods': {
            'HybridDeviceOptimizer': [
                '_move_new_state_to_right_device', '_register_load_state_dict_hooks',
                '_update_fp32_params_by_new_state', 'dummy_step', 'step',
                'update_fp32_param_by_new_param',
            ],
        },
        'attributes': {
            'HybridDeviceOptimizer': [
                'cpu_copy_map_grad', 'defaults', 'gpu_optimizer', 'inner_param_to_orig_param',
                'param_groups', 'param_to_inner_param', 'register_load_state_dict_post_hook',
                'state', 'sub_optimizer_kwargs', 'sub_optimizers',
            ],
        },
        'functions': [
            'HybridDeviceOptimizer._gradients_aside(self)',
            'HybridDeviceOptimizer._move_new_state_to_right_device(self)',
            'HybridDeviceOptimizer._parameters_held(self)',
            'HybridDeviceOptimizer._register_load_state_dict_hooks(self)',
            'HybridDeviceOptimizer._settle_loaded_steps(self)',
            'HybridDeviceOptimizer._update_fp32_params_by_new_state(self)',
            'HybridDeviceOptimizer.dummy_step(self)', 'HybridDeviceOptimizer.state_dict(self)',
            'HybridDeviceOptimizer.step(self, closure=)',
            'HybridDeviceOptimizer.update_fp32_param_by_new_param(self)', '_keep_own_name(cls)',
            '_to_gpu(value)',
        ],
    },
    'megatron.core.optimizer.distrib_optimizer': {
        'extends': True,
        'overlay': ['.optimizer', 'megatron.core.optimizer.cpu_offloading.hybrid_optimizer'],
        'names': {
            'megatron.core.dist_checkpointing': ['ShardedTensor'],
            'megatron.core.dist_checkpointing.core': ['CheckpointingException'],
            'megatron.core.optimizer.distrib_optimizer': [
                'DistributedOptimizer', 'HybridDeviceOptimizer',
            ],
        },
        'methods': {
            'DistributedOptimizer': [
                '_build_optimizer_group_ranges', '_copy_model_params_to_main_params',
                '_get_main_param_and_optimizer_states', '_set_main_param_and_optimizer_states',
                'get_parameter_state_dp_reshardable', 'get_parameter_state_dp_zero',
                'load_parameter_state_from_dp_reshardable', 'load_parameter_state_from_dp_zero',
                'load_parameter_state_from_fully_reshardable', 'load_state_dict',
                'sharded_param_state_dp_reshardable', 'sharded_param_state_fully_reshardable',
                'state_dict',
            ],
        },
        'attributes': {
            'DistributedOptimizer': [
                '_get_model_param_range_map', 'buffers', 'config', 'data_parallel_group',
                'ddp_config', 'gbuf_ranges', 'init_state_fn', 'is_stub_optimizer',
                'model_param_group_index_map', 'opt_group_ranges', 'optimizer',
            ],
        },
        'functions': [
            'DistributedOptimizer._all_ranks_fit(self)',
            'DistributedOptimizer._bucket_entries(self, param_state)',
            'DistributedOptimizer._bucket_lists(self, param_state)',
            'DistributedOptimizer._build_optimizer_group_ranges(cls, param_groups, gbuf_ranges)',
            'DistributedOptimizer._clone_of_state(self, param)',
            'DistributedOptimizer._copy_model_params_to_main_params(self, *args, **kwargs)',
            'DistributedOptimizer._entry_without_elements(self)',
            'DistributedOptimizer._get_main_param_and_optimizer_states(self, model_param)',
            'DistributedOptimizer._hand_state_to_sub_optimizers(self)',
            'DistributedOptimizer._has_part(self, index, bucket_index)',
            'DistributedOptimizer._initialize_state(self)',
            'DistributedOptimizer._main_params_fit(self)',
            'DistributedOptimizer._params_in_model_space_order(self)',
            'DistributedOptimizer._set_inner_param(self, model_param, main_param)',
            'DistributedOptimizer._set_main_param_and_optimizer_states(self, model_param, tensors)',
            'DistributedOptimizer._settle_mixed_groups(self)',
            'DistributedOptimizer._step_without_parameters(self)',
            'DistributedOptimizer._unwritten_world_tensors(self)',
            'DistributedOptimizer._world_tensor_keys(self)',
            'DistributedOptimizer._world_tensors_as_buffers_are(self)',
            'DistributedOptimizer.get_parameter_state_dp_reshardable(self)',
            'DistributedOptimizer.get_parameter_state_dp_zero(self, *args, **kwargs)',
            'DistributedOptimizer.load_parameter_state_from_dp_reshardable(self, state_dict)',
            'DistributedOptimizer.load_parameter_state_from_dp_zero(self, *args, **kwargs)',
            'DistributedOptimizer.load_parameter_state_from_fully_reshardable(self, *args, **kwargs)',
            'DistributedOptimizer.load_state_dict(self, state_dict)',
            'DistributedOptimizer.sharded_param_state_dp_reshardable(self, model_sharded_state_dict, is_loading=, metadata=)',
            'DistributedOptimizer.sharded_param_state_fully_reshardable(self, model_sharded_state_dict, is_loading=, metadata=)',
            'DistributedOptimizer.state_dict(self)', '_in_group(params)',
            '_insert_bucket_padding(world_tensors, buckets)', '_is_whole(state, template)',
            '_is_without_elements(entry)', '_share_memory(state, model_param)', '_size(buckets)',
        ],
    },
    'megatron.core.optimizer.optimizer': {
        'extends': True,
        'names': {
            'megatron.core.dist_checkpointing.core': ['CheckpointingException'],
            'megatron.core.optimizer.optimizer': [
                'ChainedOptimizer', 'param_group_identifier_keys',
            ],
        },
        'methods': {'ChainedOptimizer': ['load_state_dict']},
        'attributes': {'ChainedOptimizer': ['chained_optimizers']},
        'functions': [
            'ChainedOptimizer._with_own_number_of_optimizers(self, state_dict)',
            'ChainedOptimizer.load_state_dict(self, state_dict)',
            '_settings_for(own_groups, stored_groups)', 'group_identity(group, keys)',
            'group_rates(group)', 'groups_alike(own_groups, stored_groups, keys=)',
        ],
    },
    'megatron.training.arguments': {
        'extends': True,
        'overlay': [
            'megatron.core.dist_checkpointing.serialization',
            'megatron.core.dist_checkpointing.strategies.torch',
            'megatron.core.dist_checkpointing.validation',
            'megatron.core.optimizer.cpu_offloading.hybrid_optimizer',
            'megatron.core.optimizer.distrib_optimizer', 'megatron.core.optimizer.optimizer',
        ],
        'names': {'megatron.training.arguments': ['add_megatron_arguments']},
        'functions': ['add_megatron_arguments(parser)'],
    },
    'megatron.training.checkpointing': {
        'extends': True,
        'overlay': [
            '.gpt_hybrid_load', '.group_schedules',
            'megatron.core.dist_checkpointing.checkpoint_keys',
            'megatron.core.dist_checkpointing.checkpoint_layout',
            'megatron.core.dist_checkpointing.format_names',
            'megatron.core.dist_checkpointing.gpt_checkpoint_interop',
            'megatron.core.dist_checkpointing.hybrid_checkpoint_interop',
            'megatron.core.dist_checkpointing.load_plan',
            'megatron.core.dist_checkpointing.optimizer_load',
            'megatron.core.dist_checkpointing.read_record',
            'megatron.core.dist_checkpointing.saved_arguments',
            'megatron.core.dist_checkpointing.serialization',
            'megatron.core.dist_checkpointing.stored_checkpoint',
            'megatron.core.dist_checkpointing.strategies.torch',
            'megatron.core.dist_checkpointing.unstored_state',
            'megatron.core.dist_checkpointing.validation',
            'megatron.core.optimizer.cpu_offloading.hybrid_optimizer',
            'megatron.core.optimizer.distrib_optimizer', 'megatron.core.optimizer.optimizer',
        ],
        'names': {
            'megatron.core.dist_checkpointing': ['load_content_metadata'],
            'megatron.core.dist_checkpointing.core': ['CheckpointingException'],
            'megatron.core.dist_checkpointing.dict_utils': ['nested_values'],
            'megatron.core.dist_checkpointing.mapping': ['ShardedObject', 'ShardedTensor'],
            'megatron.core.models.gpt': ['GPTModel'],
            'megatron.core.models.hybrid.hybrid_model': ['HybridModel'],
            'megatron.training.checkpointing': [
                'CheckpointType', '_load_base_checkpoint', 'check_checkpoint_args',
                'generate_state_dict', 'get_args', 'load_args_from_checkpoint', 'load_checkpoint',
                'print_rank_0', 'unwrap_model',
            ],
        },
        'functions': [
            '_asks_for_others(sharded_state_dict, name, keys)',
            '_decide(load, stored, args, model)',
            '_is_asked_for(name, load, sharded_state_dict, args)', '_kind(chunks)',
            '_load_base_checkpoint(load_dir, args, rank0=, sharded_state_dict=, **kwargs)',
            '_look_at_checkpoint(load, args, state_dict, checkpoint_name, release, ckpt_type)',
            '_maybe_setup_gpt_to_hybrid_load(args, ckpt_args, model)', '_on_first_rank(read)',
            '_point_at_checkpoint(load, layer_maps, sharded_state_dict)',
            '_refuse_other_format(args, checkpoint_name, ckpt_type)',
            '_refuse_other_legacy(state_dict, checkpoint_name, run)',
            '_refuse_what_is_not_stored(load, sharded_state_dict, args)',
            '_tell_that_this_is_active()', '_without_mismatches(loaded)',
            'check_checkpoint_args(checkpoint_args, *args, **kwargs)',
            'generate_state_dict(args, model, optimizer, *rest, **kwargs)',
            'load_args_from_checkpoint(args, *rest, **kwargs)',
            'load_checkpoint(ddp_model, optimizer, opt_param_scheduler, load_arg=, strict=, *args, **kwargs)',
        ],
    },
    'megatron.training.gpt_hybrid_load': {
        'overlay': [
            '.group_schedules', 'megatron.core.dist_checkpointing.checkpoint_keys',
            'megatron.core.dist_checkpointing.load_plan',
            'megatron.core.dist_checkpointing.stored_checkpoint',
        ],
        'names': {
            'megatron.core.dist_checkpointing.core': ['CheckpointingException'],
            'megatron.core.dist_checkpointing.dict_utils': ['nested_values'],
            'megatron.core.dist_checkpointing.mapping': ['LocalNonpersistentObject', 'ShardedBase'],
        },
    },
    'megatron.training.group_schedules': {
        'overlay': ['megatron.core.optimizer.optimizer'],
        'names': {'megatron.core.optimizer.optimizer': ['param_group_identifier_keys']},
    },
}
