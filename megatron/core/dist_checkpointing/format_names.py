"""Names that checkpoints, arguments and messages have for formats, and for kinds of models."""

# Of a checkpoint, as in `--ckpt-format`.
TORCH_DIST, FSDP_DTENSOR, TORCH_DCP, LEGACY = 'torch_dist', 'fsdp_dtensor', 'torch_dcp', 'torch'

# Of the distributed optimizer's state: by parameter, in the buckets of the ranks that saved it
# (core's default), and by parameter with all axes as one (its default up to core 0.14).
FULLY_RESHARDABLE, IN_BUCKETS, FLATTENED = (
    'fully_reshardable',
    'dp_reshardable',
    'fully_sharded_model_space',
)
# Before that, and gone.
GATHERED = 'dp_zero_gather_scatter'
# By parameter, of an optimizer that isn't distributed, or distributed by layers; no state at all.
PLAIN, NO_STATE = 'plain', 'none'

# Of a model; `other` where keys show neither.
GPT, HYBRID, OTHER = 'gpt', 'hybrid', 'other'
