"""Weighted merge: where the output goes, its common state and `_extra_state`."""

import argparse
import io
import json
import pickle
import sys
import types
from contextlib import contextmanager
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing

from tests.cpu_megatron.whole_checkpoint import ALONE
from tests.unit_tests.tools.checkpoint.handmade import (
    add_tensor,
    assert_same,
    copied,
    load_tensors,
    model_tensors,
    plain_merge,
    set_common_form,
    write_checkpoint,
)
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.inspect_checkpoint import inspect_checkpoint
from tools.checkpoint.inspect_checkpoint import main as main_of_inspector
from tools.checkpoint.resume_report import main as main_of_report
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge


def test_output_directory_names(five, tmp_path):
    _, paths, _ = five
    pair, weights = paths[:2], [0.5, 0.5]
    assert merge(pair, weights, tmp_path / 'a', 7).output_dir == tmp_path / 'a/iter_0000007'
    named = tmp_path / 'b/iter_0000007'
    assert merge(pair, weights, named, 7).output_dir == named
    with pytest.raises(CheckpointError, match='another iteration, expected iter_0000008'):
        merge(pair, weights, tmp_path / 'c/iter_0000007', 8)
    with pytest.raises(CheckpointError, match='exists'):
        merge(pair, weights, tmp_path / 'a', 7)
    (tmp_path / 'link').symlink_to(pair[0])
    with pytest.raises(CheckpointError, match='inside the input'):
        merge(pair, weights, tmp_path / 'link' / 'below')
    with pytest.raises(CheckpointError, match='inside the input'):
        merge(pair, weights, paths[0] / 'out')
    for common in (paths[2], five[0] / 'iter_0000300'):
        with pytest.raises(CheckpointError, match='inside --common-state-checkpoint'):
            merge(pair, weights, paths[2] / 'out', common_state_checkpoint=common, dry_run=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['a', 'b', 'link']


def test_common_state_forms_mix_and_the_iteration_decides(five, tmp_path):
    _, paths, _ = five
    legacy = copied(paths[1], tmp_path / 'iter_0000200')
    args = argparse.Namespace(iteration=200, lr=0.5)
    set_common_form(legacy, {'iteration': 200, 'args': args, 'who': 'legacy'}, 'legacy')
    bare = copied(paths[2], tmp_path / 'bare')
    set_common_form(bare, None, None)
    weights = [0.2, 0.3, 0.5]

    embedded = copied(paths[0], tmp_path / 'iter_0000100')
    set_common_form(embedded, {'iteration': 100}, 'embedded')
    inputs = [bare, embedded, legacy]

    def common(iteration, name):
        out = merge(inputs, weights, tmp_path / name, iteration).output_dir
        return dist_checkpointing.load_common_state_dict(str(out))

    state = common(200, 'a')
    assert state['who'] == 'legacy' and state['args'].lr == 0.5
    state = common(9, 'b')  # no input records it: the first that has common state
    assert state['iteration'] == 9 and 'who' not in state
    inputs, weights = inputs[::-1], weights[::-1]
    state = common(9, 'c')
    assert state['iteration'] == 9 and state['args'].iteration == 9 and state['who'] == 'legacy'
    assert torch.load(legacy / 'common.pt')['args'].iteration == 200


@contextmanager
def module_of_another_environment(name):
    """A module with a class ``FusedAdam`` that is there while a checkpoint is written, then not."""
    names = ['.'.join(name.split('.')[:end]) for end in range(1, name.count('.') + 2)]
    modules = {part: types.ModuleType(part) for part in names}
    modules[name].FusedAdam = type('FusedAdam', (), {'__module__': name})
    with mock.patch.dict(sys.modules, modules):
        yield modules[name].FusedAdam


@pytest.mark.parametrize('form', ['legacy', 'embedded', 'as core writes it'])
def test_optimizer_classes_of_an_offloading_run(tmp_path, form):
    name = 'transformer_engine.pytorch.optimizers.fused_adam'
    path = tmp_path / 'iter_0000100'
    with module_of_another_environment(name) as fused_adam:
        group = {'lr': 0.5, 'cpu_optimizer_cls': torch.optim.AdamW, 'gpu_optimizer_cls': fused_adam}
        state = {'iteration': 100, 'optimizer': {'optimizer': {'param_groups': [group]}}}
        write_checkpoint(path, model_tensors(100), common=state)
        if form in ('legacy', 'embedded'):
            set_common_form(path, state, form)
    assert inspect_checkpoint(path).uses[0].works
    for reader in (main_of_report, main_of_inspector):
        assert reader([str(path)]) == 0
    out = merge([path], [1.0], tmp_path / 'out', 7).output_dir
    # as stock reads it: classes of optimizers aren't among what it admits
    found = torch.load(out / 'common.pt', weights_only=True)
    assert found['optimizer'] == {'optimizer': {'param_groups': [{'lr': 0.5}]}}
    assert found['iteration'] == 7


@pytest.mark.parametrize('protocol', [2, 3, 4, 5])
def test_optimizer_classes_in_any_pickle_protocol(tmp_path, protocol):
    path = tmp_path / 'iter_0000100'
    group = {'lr': 0.5, 'cpu_optimizer_cls': torch.optim.AdamW}
    state = {'iteration': 100, 'optimizer': {'optimizer': {'param_groups': [group]}}}
    write_checkpoint(path, model_tensors(100), common=state)
    set_common_form(path, state, 'legacy')
    torch.save(state, path / 'common.pt', pickle_protocol=protocol)
    out = merge([path], [1.0], tmp_path / 'out', 7).output_dir
    found = torch.load(out / 'common.pt', weights_only=True)
    assert found['optimizer'] == {'optimizer': {'param_groups': [{'lr': 0.5}]}}


def test_common_state_that_needs_what_is_not_installed(five, tmp_path):
    """It is read where it is needed only, and the way out is another one."""
    _, paths, models = five
    foreign, plain = (copied(path, tmp_path / path.name) for path in paths[:2])
    with module_of_another_environment('forklib.parts') as part:
        set_common_form(foreign, {'iteration': 100, 'part': part}, 'legacy')
    set_common_form(plain, {'iteration': 200}, 'embedded')
    pair, weights = [foreign, plain], [0.5, 0.5]
    out = merge(pair, weights, tmp_path / 'later', 200).output_dir
    assert_same(load_tensors(out), plain_merge(models[:2], weights))
    merge(pair[::-1], weights, tmp_path / 'first of no iteration')
    merge(pair, weights, tmp_path / 'given', 200, common_state_checkpoint=plain)
    for trust, expected in (
        (
            False,
            r'common\.pt: refused class forklib\.parts\.FusedAdam, whose package forklib is not',
        ),
        (True, r'common\.pt: needs what is not installed here \(module forklib\)'),
    ):
        for iteration in (None, 100, 300):
            with pytest.raises(CheckpointError, match=expected) as caught:
                merge(pair, weights, tmp_path / 'x', iteration, trust_checkpoints=trust)
            message = str(caught.value)
            assert '--common-state-checkpoint' in message
            assert 'pass --trust' not in message and 'damaged' not in message
    assert not (tmp_path / 'x').exists()


def test_checkpoints_of_core_018_and_019_merge(five, tmp_path):
    """They differ in where the common state lies, and in that 0.18 says so in metadata.json."""
    _, paths, models = five
    old, new = (copied(paths[i], tmp_path / paths[i].name) for i in (0, 1))
    tensors = {'sharded_backend': 'torch_dist', 'sharded_backend_version': 1}
    state = {'checkpoint_version': 3.0, 'args': argparse.Namespace(lr=0.5)}
    set_common_form(old, {**state, 'iteration': 100}, 'legacy')
    set_common_form(new, {**state, 'iteration': 200}, 'embedded')
    config = {**tensors, 'common_backend': 'torch', 'common_backend_version': 1}
    (old / 'metadata.json').write_text(json.dumps(config))
    (new / 'metadata.json').write_text(json.dumps(tensors))
    (new / 'integrity.json').unlink(missing_ok=True)  # of the state before set_common_form
    expected = plain_merge(models[:2], [0.5, 0.5])
    for name, pair in (('a', [old, new]), ('b', [new, old])):
        for iteration in (100, 200):
            out = merge(pair, [0.5, 0.5], tmp_path / name, iteration, verify=True).output_dir
            assert_same(load_tensors(out), expected)
            common = dist_checkpointing.load_common_state_dict(str(out))
            assert (out / 'metadata.json').read_text() == (pair[0] / 'metadata.json').read_text()
            source = common['weighted_merge_provenance']['common_state_source']
            assert source.endswith(f'{iteration}') and common['args'].lr == 0.5


def test_model_shards_only_and_a_given_common_state(five, tmp_path):
    _, paths, models = five
    bare = [copied(path, tmp_path / path.name) for path in paths[:2]]
    for path in bare:
        set_common_form(path, None, None)
    result = merge(bare, [0.5, 0.5], tmp_path / 'none')
    assert any('no input has common state' in text for text in result.warnings)
    state = torch.load(tmp_path / 'none/common.pt')
    assert list(state) == ['weighted_merge_provenance']
    given = copied(paths[2], tmp_path / 'given')
    merge(bare, [0.5, 0.5], tmp_path / 'out', 300, common_state_checkpoint=given, verify=True)
    state = torch.load(tmp_path / 'out/iter_0000300/common.pt')
    assert state['iteration'] == 300
    assert state['weighted_merge_provenance']['extra_state_source'] == str(given)
    with pytest.raises(CheckpointError, match='records iteration 300, but --output-iteration is 5'):
        merge(bare, [0.5, 0.5], tmp_path / 'x', 5, common_state_checkpoint=given)
    with pytest.raises(CheckpointError, match='no common state'):
        merge(bare, [0.5, 0.5], tmp_path / 'x', 5, common_state_checkpoint=bare[0])
    assert not (tmp_path / 'x').exists()


def test_both_forms_or_another_embedded_layout_are_refused(five, tmp_path):
    both = copied(five[1][0], tmp_path / 'both')
    set_common_form(both, {'iteration': 100}, 'embedded')
    torch.save({'iteration': 100}, both / 'common.pt')
    with pytest.raises(CheckpointError, match='common state both in'):
        merge([both], [1], tmp_path / 'out')
    other = copied(five[1][0], tmp_path / 'other')
    set_common_form(other, {'iteration': 100}, 'embedded')
    metadata = dcp.FileSystemReader(other).read_metadata()
    entries = metadata.state_dict_metadata
    entries['common_state/shard_0_2'] = entries.pop('common_state/shard_0_1')
    (other / '.metadata').write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match='stored as common_state/shard_0_2'):
        merge([other], [1], tmp_path / 'out')


def test_extra_state_comes_from_the_chosen_input(tmp_path):
    key = 'decoder.layers.mlp.linear_fc1._extra_state'
    paths = [
        write_checkpoint(tmp_path / f'{i}', model_tensors(i), extra_states={key: data})
        for i, data in enumerate([b'zero', b'one'])
    ]

    def stored(out):
        state = {f'{key}/shard_0_1': io.BytesIO()}
        planner = dcp.DefaultLoadPlanner()
        found = {}
        planner.load_bytes = lambda item, value: found.update({item.dest_index.fqn: value})
        dcp.load(state, checkpoint_id=out, **ALONE, planner=planner)
        return torch.load(found[f'{key}/shard_0_1'], weights_only=True)

    for index, expected in ((None, b'zero'), (0, b'zero'), (1, b'one')):
        out = merge(
            paths, [0.5, 0.5], tmp_path / f'out{index}', extra_state_source_index=index
        ).output_dir
        assert stored(out) == [expected]
    with pytest.raises(CheckpointError, match='expected 0 to 1'):
        merge(paths, [0.5, 0.5], tmp_path / 'x', extra_state_source_index=2)


@pytest.mark.parametrize('layout', [(0, 1), (0, 2)])
def test_extra_state_that_is_a_tensor_is_copied_as_it_is(tmp_path, layout):
    """Of any dtype, also empty and without dimensions; other sizes in other inputs don't matter."""
    names = [f'decoder.layers.{i}.mlp.linear_fc1._extra_state' for i in range(4)]

    def extra_states(seed):
        return dict(
            zip(
                names,
                [
                    torch.arange(seed, seed + 6 * seed, dtype=torch.uint8),
                    torch.empty(0, dtype=torch.uint8),
                    torch.tensor(float(seed)).to(torch.float8_e4m3fn),
                    torch.tensor([1.0, torch.nan, seed]),
                ],
                strict=True,
            )
        )

    models = [model_tensors(seed) for seed in (1, 2)]
    paths = []
    for seed, model in enumerate(models, start=1):
        model = {**model, names[0]: extra_states(seed)[names[0]]}
        paths.append(write_checkpoint(tmp_path / str(seed), model, layout={names[0]: layout}))
        for name in names[1:]:
            add_tensor(paths[-1], name, extra_states(seed)[name])
    for index in (0, 1):
        result = merge(
            paths, [0.5, 0.5], tmp_path / f'out{index}', extra_state_source_index=index, verify=True
        )
        assert (result.copied_extra_states, result.averaged_tensors) == (4, len(models[0]))
        found = load_tensors(result.output_dir)
        for name, value in extra_states(index + 1).items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert torch.equal(
                found.pop(name).reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
            )
        assert_same(found, plain_merge(models, [0.5, 0.5]))
    again = merge([result.output_dir], [1.0], tmp_path / 'again').output_dir
    assert_same(
        {key: value for key, value in load_tensors(again).items() if key not in names}, found
    )


@pytest.mark.parametrize('number', [200.0, numpy.int64(200), numpy.float64(200)])
def test_iteration_of_any_number_type(five, tmp_path, number):
    _, paths, _ = five
    first, second = (copied(path, tmp_path / path.name) for path in paths[:2])
    set_common_form(first, {'iteration': 100, 'of': 'first'}, 'legacy')
    set_common_form(second, {'iteration': number, 'of': 'second'}, 'legacy')
    out = merge([first, second], [0.5, 0.5], tmp_path / 'out', 200).output_dir
    assert torch.load(out / 'common.pt', weights_only=True)['of'] == 'second'
    with pytest.raises(CheckpointError, match='200'):
        merge([first], [1.0], tmp_path / 'x', 100, common_state_checkpoint=second)


@pytest.mark.parametrize('dry_run', [True, False])
def test_common_state_that_can_not_be_stored_again(five, tmp_path, dry_run):
    """Classes of optimizers are left out where Megatron puts them, and refused elsewhere."""
    source = copied(five[1][0], tmp_path / 'source')
    set_common_form(source, {'optimizer': {'x': (torch.optim.AdamW,)}}, 'legacy')
    with pytest.raises(CheckpointError, match='saved again.*--common-state-checkpoint'):
        merge([source], [1.0], tmp_path / 'out', 7, dry_run=dry_run)
    assert not (tmp_path / 'out').exists()
