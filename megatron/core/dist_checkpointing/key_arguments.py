"""Arguments of a run that messages name: those that decide whether its model has a weight."""

import re
from collections.abc import Iterable

from .checkpoint_keys import is_optimizer_state, parse_key

# The first that is found in a parameter's name counts.
_ARGUMENTS = (
    (r'\.router\.expert_bias', '--moe-router-enable-expert-bias'),
    (r'\.shared_experts\.gate_weight', '--moe-shared-expert-gate'),
    (r'\.shared_experts\.', '--moe-shared-expert-intermediate-size'),
    (r'\.[qk]_layernorm\.', '--qk-layernorm'),
    (r'\.softmax_offset', '--softmax-type'),
    (r'\.linear_(q|kv)_down_proj|\.linear_kv_up_proj', '--multi-latent-attention'),
    (r'\.linear_q_(up_)?proj', '--q-lora-rank'),
    (r'^mtp\.', '--mtp-num-layers'),
    (r'^output_layer\.weight', '--untie-embeddings-and-output-weights'),
    (r'^embedding\.position_embeddings\.', '--position-embedding-type'),
    (r'norm[._]bias', '--normalization'),
    (r'\.linear_qkv\.bias', '--add-qkv-bias'),
    (r'\.mlp\.(router|experts)\.\S*weight|\.mlp\.linear_fc\d\.weight', '--num-experts'),
    (r'bias\d*$', '--disable-bias-linear'),
)
LEGACY_WAY_OUT = (
    'a run of the model that saved it, with --ckpt-convert-format torch_dist --ckpt-convert-save '
    'DIR, saves one that is'
)


def arguments_behind(keys: Iterable[str], layers: str) -> str:
    """Words on which arguments to look at, for weights that one of run and checkpoint lacks.

    Args:
        keys: of the weights, or of optimizer state of them.
        layers: the argument that gives the run its layers, for weights that all models have.
    """
    found = {argument for key in keys for argument in _arguments(key, layers)}
    if '--disable-bias-linear' in found:
        found.discard('--add-qkv-bias')  # of the attention only
    return f'Give the run the arguments of the one that saved it: {", ".join(sorted(found))}.'


def _arguments(key: str, layers: str):
    name = parse_key(key).name
    argument = next((option for part, option in _ARGUMENTS if re.search(part, name)), layers)
    yield argument
    if argument == '--num-experts':
        yield layers  # it says which MLPs are MoE
    if argument == '--qk-layernorm' and layers == '--hybrid-layer-pattern':
        yield '--spec (one whose attention has these norms)'
    if is_optimizer_state(key):
        yield '--optimizer (or pass --no-load-optim)'
