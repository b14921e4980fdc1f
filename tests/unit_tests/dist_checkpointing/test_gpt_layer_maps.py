"""Which GPT layer each layer of a pattern reads, alone and by the layers of real checkpoints."""

import dataclasses

import pytest
from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop
from megatron.core.dist_checkpointing.checkpoint_layout import read_checkpoint_layout
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from tests.unit_tests.dist_checkpointing.gpt_runs import MLA, load_into_hybrid, save_gpt


def test_maps_pair_the_ith_positions():
    maps = interop.gpt_compatible_layer_maps('M*M|-*-')
    assert maps == interop.GPTCompatLayerMaps({1: 0, 4: 1}, {3: 0, 5: 1}, frozenset({0, 2}), 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        maps.num_gpt_layers = 3


@pytest.mark.parametrize(
    'pattern, keeps', [('M*M-*M-', True), ('**--', False), ('*-*M*--', False), ('E*', False)]
)
def test_maps_tell_whether_layers_are_computed_in_another_order(pattern, keeps):
    assert interop.gpt_compatible_layer_maps(pattern).keeps_gpt_order is keeps


@pytest.mark.parametrize(
    'pattern, reason',
    [
        (None, 'empty'),
        ('', 'empty'),
        ('|', 'no layers'),
        ('*-/*-', 'MTP'),
        ('/MM', 'MTP'),
        # callers match on upstream's phrases
        ('*-G', "'G'.* cannot be translated"),
        ('D-', "'D'.* cannot be translated"),
        ('+-', r"'\+'"),
        ('*-x', 'x'),
        ('*-*E', "dense.* one of '-' or 'E'"),
        ('**-', '2 attention.* equal, nonzero'),
        ('M*-M*', '1 MLP.* equal, nonzero'),
        ('MM', '0 attention.* equal, nonzero'),
        ('--', '0 attention.* equal, nonzero'),
    ],
)
def test_patterns_without_a_gpt_counterpart_are_refused(pattern, reason):
    with pytest.raises(ValueError, match=reason) as error:
        interop.gpt_compatible_layer_maps(pattern)
    assert repr(pattern) in str(error.value)


def test_a_pattern_of_other_layers_than_the_checkpoint_s_is_refused(tmp_path):
    save_gpt(tmp_path / 'dense')
    layout = read_checkpoint_layout(str(tmp_path / 'dense'))
    assert (layout.family, layout.num_layers, layout.indexed) == ('gpt', 2, False)
    for pattern, reason in [
        ('*-', 'is for 1 GPT layer.*has 2 layers; give it 2 attention and 2 MLP layers'),
        ('*E*E', "layer 1 is 'E', .* is dense: use '-'"),
        ('*-*E', 'mixes'),
    ]:
        with pytest.raises(ValueError, match=reason):
            interop.gpt_compatible_layer_maps(pattern, layout)


def test_attention_of_another_kind_is_refused_by_name(tmp_path):
    save_gpt(tmp_path / 'dense')
    save_gpt(tmp_path / 'latent', **MLA)
    dense, latent = (read_checkpoint_layout(str(tmp_path / name)) for name in ('dense', 'latent'))
    assert (dense.latent_attention, latent.latent_attention) == (False, True)
    with pytest.raises(ValueError, match=r"multi-latent \(MLA\), so it goes into '\+'.*not.*'\*'"):
        interop.gpt_compatible_layer_maps('M*-*-', latent)
    reason = r"not multi-latent \(MLA\), so it goes into '\*'" if hasattr(Symbols, 'MLA') else r'\+'
    with pytest.raises(ValueError, match=reason):
        interop.gpt_compatible_layer_maps('M+-+-', dense)


def test_mtp_depths_that_do_not_pair_are_refused(tmp_path):
    save_gpt(tmp_path / 'plain')
    save_gpt(tmp_path / 'mtp', mtp_num_layers=2)
    plain, mtp = (read_checkpoint_layout(str(tmp_path / name)) for name in ('plain', 'mtp'))
    assert (plain.mtp_depths, mtp.mtp_depths) == (0, 2)
    for pattern, layout, reason in [
        ('*-*-/*-', plain, "MTP part '\\*-' has no source"),
        ('*-*-/*-', mtp, '1 MTP depths, the checkpoint 2'),
        ('*-*-/*-/*-/*-', mtp, '3 MTP depths, the checkpoint 2'),
        ('*-*-/M/M', mtp, '0 attention .* and 0 MLP'),
        ('*-*-/*-*-/*-*-', mtp, '2 attention .* and 2 MLP'),
        ('*-*-/G-/G-', mtp, '0 attention .* and 1 MLP'),
        ('*-*-/*Q/*Q', mtp, "'Q'"),
    ]:
        with pytest.raises(ValueError, match=reason):
            interop.gpt_compatible_layer_maps(pattern, layout)
    # The other kind of MLP has other keys.
    with pytest.raises(CheckpointingException, match=r'mtp\.layers\.0\.transformer_layer\.mlp'):
        load_into_hybrid(tmp_path / 'mtp', '*-*-/*E/*E', tmp_path / 'again', num_moe_experts=4)
    assert interop.gpt_compatible_layer_maps('*-*-/M*-/M*-', mtp).keeps_gpt_order
    assert not interop.gpt_compatible_layer_maps('*-*-/-*/-*', mtp).keeps_gpt_order
    # Without an MTP part the depths stay unread.
    assert not interop.gpt_compatible_layer_maps('*-*-', mtp).mtp_pattern
