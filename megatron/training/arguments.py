"""Amends upstream's parser: what a run may do with the attention of a GPT checkpoint."""

import megatron_overlay

upstream = megatron_overlay.upstream(__name__)


def add_megatron_arguments(parser):
    """Upstream's, and those of a load from GPT into hybrid."""
    parser = upstream.add_megatron_arguments(parser)
    group = parser.add_argument_group(title='GPT checkpoint into a hybrid model')
    group.add_argument(
        '--replace-gpt-attention',
        action='store_true',
        help='Of a GPT checkpoint, leave the attention unread where the hybrid layer pattern has '
        'none before an MLP. Each MLP of the pattern then ends the layers of one GPT layer.',
    )
    group.add_argument(
        '--init-mamba-from-attention',
        action='store_true',
        help='With --replace-gpt-attention: a Mamba layer in the place of an attention begins with '
        "the attention's values as x, keys as B, queries as C, its output projection and the norm "
        'before it. Needs --mamba-num-heads and --mamba-num-groups equal to the number of '
        'attention heads, --mamba-head-dim and --mamba-state-dim equal to --kv-channels.',
    )
    return parser
