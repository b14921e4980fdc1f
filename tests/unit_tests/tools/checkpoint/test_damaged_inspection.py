"""Whatever is the matter with a checkpoint, looking at it ends in a report or in one line.

That is the inspector, its ``--diff``, the dry run of a load and the optimizer's resume report.
Fixed examples in the suite; ``RELIABILITY_EXAMPLES=5000`` makes a campaign of each, see
docs/reliability.md.
"""

import contextlib
import io
import json
import math
import pickle
import shutil
from argparse import Namespace
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.checkpoint_keys import MODEL, kind_of
from megatron.core.dist_checkpointing.serialization import leaked_param_states
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.unit_tests.tools.checkpoint.damage import (
    damaged_bytes,
    damaged_json,
    damaged_object,
    damaged_pickle,
    examples,
    guarded,
    looped_file,
    saved,
)
from tests.unit_tests.tools.checkpoint.handmade import set_common_form, write_checkpoint
from tests.unit_tests.tools.checkpoint.inspect_runs import TRACKER
from tests.unit_tests.tools.checkpoint.pp_vpp_files import ITERATION
from tools.checkpoint.inspect_checkpoint import inspect_checkpoint, main
from tools.checkpoint.inspection.gpt_into_hybrid import dry_run as report
from tools.checkpoint.resume_report import main as resume

SETTINGS = 'optimizer.distributed.dp_group_idx_0.optimizer'
GPT = {
    'embedding.word_embeddings.weight': torch.arange(60.0).reshape(12, 5).bfloat16(),
    'decoder.layers.self_attention.linear_qkv.weight': torch.ones(2, 6, 4).bfloat16(),
    'decoder.layers.mlp.linear_fc1.weight': torch.arange(48.0).reshape(2, 6, 4).bfloat16(),
    'decoder.final_layernorm.weight': torch.ones(5),
}
HYBRID = {
    'embedding.word_embeddings.weight': torch.ones(12, 5),
    'decoder.layers.0.mixer.in_proj.weight': torch.ones(6, 4),
    'decoder.layers.1.self_attention.linear_qkv.weight': torch.ones(6, 4),
    'decoder.layers.2.mlp.linear_fc1.weight': torch.ones(6, 4),
    'decoder.final_norm.weight': torch.ones(5),
}
COMMON = {
    'iteration': 2,
    'args': Namespace(
        num_layers=2,
        iteration=2,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=None,
        world_size=16,
        hybrid_layer_pattern=None,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=0.5,
        use_distributed_optimizer=True,
    ),
    'content_metadata': {'distrib_optim_sharding_type': 'fully_reshardable'},
    'optimizer': {'param_groups': [{'step': 2, 'lr': 0.1}], 'param_state': {0: {'step': 2}}},
}


class Lab:
    """Checkpoints of which files get damaged, and are put right again."""

    def __init__(self, root):
        self.paths = []
        for i, model in enumerate((GPT, GPT, HYBRID), 1):
            state = {f'optimizer.state.param.{key}': value.float() for key, value in model.items()}
            settings = {f'{SETTINGS}': {'param_groups': [{'step': i}]}}
            path = write_checkpoint(
                root / f'iter_{i:07d}',
                model | state,
                layout={'decoder.layers.mlp.linear_fc1.weight': (0, 2)},
                extra_states={'decoder.layers._extra_state': b'state', **settings},
            )
            set_common_form(path, COMMON, 'embedded' if i == 2 else 'legacy')
            self.paths.append(path)
        self.common = torch.load(self.paths[0] / 'common.pt', weights_only=False)

    @contextlib.contextmanager
    def damaged(self, path, data):
        """``data`` in place of a file, or beside the others."""
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(data)
        try:
            yield
        finally:
            path.unlink() if before is None else path.write_bytes(before)


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    made = Lab(tmp_path_factory.mktemp('lab'))
    for path in made.paths:
        assert ends_well(main, path) == ends_well(main, '--json', path) == 0
        assert ends_well(resume, path) == ends_well(resume, path, '--check-weights') == 0
    assert ends_well(main, '--diff', *made.paths[:2]) == 0
    assert dry_run(made.paths[0]) == 0
    return made


def ends_well(tool, *words):
    """Run a tool guarded: a report on standard output, or one line on the other; the status."""
    output, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error), guarded():
        status = tool([str(word) for word in words])
    out, err = output.getvalue(), error.getvalue()
    assert bool(out) != bool(err) and status in (0, 1), (status, out, err)
    assert all(line.isprintable() for line in out.split('\n')), out
    if err:
        assert status == 1 and err.startswith('error: ') and err[:-1].isprintable(), err
        assert 'memory' not in err, err
    elif '--json' in words:
        json.loads(out)
    return status


def dry_run(path):
    """What a load will do: a report and status 0 or 1."""
    (path.parent / TRACKER).write_text(path.name.removeprefix('iter_'))
    output = io.StringIO()
    with contextlib.redirect_stdout(output), guarded():
        status = report(str(path.parent), '*-*-')
    out = output.getvalue()
    assert status in (0, 1) and out and all(map(str.isprintable, out.split('\n'))), out
    if status == 1:
        assert out.startswith('Will not load: ') and out.count('\n') == 1, out
    return status


def look(path, other):
    """Every look at a distributed checkpoint."""
    ends_well(main, path)
    ends_well(main, '--json', path)
    ends_well(main, '--diff', path, other)
    ends_well(main, '--json', '--diff', other, path)
    dry_run(path)
    ends_well(resume, path)


def metadata_of(path):
    return FileSystemReader(path).read_metadata()


CHECKPOINTS = st.sampled_from((0, 1, 2))


@examples(20)
@given(st.data(), CHECKPOINTS)
def test_metadata_with_damaged_bytes(lab, data, which):
    path = lab.paths[which] / '.metadata'
    with lab.damaged(path, data.draw(damaged_bytes(path.read_bytes()))):
        look(path.parent, lab.paths[which - 1])


@examples(40)
@given(st.data(), CHECKPOINTS)
def test_metadata_with_odd_content(lab, data, which):
    """Where there is a report, its figures are those of the metadata."""
    path = lab.paths[which]
    content = data.draw(damaged_pickle(metadata_of(path)))
    with lab.damaged(path / '.metadata', content):
        look(path, lab.paths[which - 1])
        if ends_well(main, path) == 0:
            weights = inspect_checkpoint(path).weights
            found = {name: (amount.tensors, amount.bytes) for name, amount in weights.items()}
            assert found == figures(pickle.loads(content))


def figures(metadata):
    """Tensors and bytes of the model by dtype."""
    tensors, sizes = Counter(), Counter()
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and kind_of(key) == MODEL:
            name = str(entry.properties.dtype).removeprefix('torch.')
            tensors[name] += 1
            sizes[name] += math.prod(entry.size) * entry.properties.dtype.itemsize
    return {name: (tensors[name], sizes[name]) for name in tensors}


@examples(40)
@given(st.data(), st.booleans())
def test_common_state_with_odd_content(lab, data, embedded):
    path, other = lab.paths[int(embedded)], lab.paths[int(not embedded)]
    content = data.draw(damaged_object(lab.common))
    name = 'common.distcp' if embedded else 'common.pt'
    with lab.damaged(path / '.metadata', (path / '.metadata').read_bytes()):
        with lab.damaged(path / name, (path / name).read_bytes()):
            if embedded:
                set_common_form(path, content, 'embedded')
            else:
                (path / name).write_bytes(saved(content))
            look(path, other)


@examples(10)
@given(st.data())
def test_common_state_that_contains_itself(lab, data):
    path = lab.paths[0] / 'common.pt'
    with lab.damaged(path, data.draw(looped_file(lab.common))):
        look(path.parent, lab.paths[1])


@examples(20)
@given(st.data(), st.sampled_from(('common.pt', 'metadata.json')))
def test_files_with_damaged_bytes(lab, data, name):
    path = lab.paths[0] / name
    with lab.damaged(path, data.draw(damaged_bytes(path.read_bytes()))):
        look(path.parent, lab.paths[1])


@examples(20)
@given(st.data())
def test_settings_of_the_optimizer_with_damaged_bytes(lab, data):
    """They are read at their place among the tensors."""
    settings = [{'param_groups': [{'step': 2, 'lr': 0.1}]}]
    content = data.draw(
        st.one_of(damaged_bytes(saved(settings)), damaged_object(settings).map(saved))
    )
    with settings_of(lab, content):
        ends_well(main, lab.paths[0])
        ends_well(resume, lab.paths[0])


@contextlib.contextmanager
def settings_of(lab, content):
    """The first checkpoint with other settings of its optimizer, in a file of their own."""
    metadata = metadata_of(lab.paths[0])
    place = first_place(metadata)
    place.relative_path, place.offset, place.length = 'settings.distcp', 0, len(content)
    with (
        lab.damaged(lab.paths[0] / place.relative_path, content),
        lab.damaged(lab.paths[0] / '.metadata', pickle.dumps(metadata)),
    ):
        yield


@examples(20)
@given(st.data())
def test_weights_and_main_parameters_compared_in_damaged_files(lab, data):
    path = lab.paths[0] / data.draw(
        st.sampled_from(sorted(p.name for p in lab.paths[0].glob('*.distcp')))
    )
    with lab.damaged(path, data.draw(damaged_bytes(path.read_bytes()))):
        ends_well(resume, lab.paths[0], '--check-weights')


@examples(20)
@given(st.data())
def test_weights_and_main_parameters_compared_by_odd_metadata(lab, data):
    content = data.draw(damaged_pickle(metadata_of(lab.paths[0])))
    with lab.damaged(lab.paths[0] / '.metadata', content):
        ends_well(resume, lab.paths[0], '--check-weights')


@examples(20)
@given(st.data(), st.sampled_from(('integrity.json', 'metadata.json')))
def test_odd_json_files(lab, data, name):
    whole = {'algorithm': 'sha256', 'files': {'common.pt': 'ab'}, 'sharded_backend': 'torch_dist'}
    content = data.draw(damaged_json(whole))
    with lab.damaged(lab.paths[0] / name, content):
        look(lab.paths[0], lab.paths[1])


@examples(20)
@given(st.one_of(st.binary(max_size=30), st.from_regex(rb'[ \n]*[0-9]{1,9}[ \n]*', fullmatch=True)))
def test_odd_trackers(lab, content):
    root = lab.paths[0].parent
    with lab.damaged(root / 'latest_checkpointed_iteration.txt', content):
        look(root, lab.paths[0])


class RankLab:
    """PP 2 x VPP 2; the second rank's file gets damaged, and is put right again."""

    def __init__(self, source, root):
        shutil.copytree(source, root / 'source')
        self.path = root / 'source' / ITERATION
        self.file = self.path / 'mp_rank_00_001/model_optim_rng.pt'
        self.content = self.file.read_bytes()
        self.state = torch.load(self.file, weights_only=False)

    def look(self, data):
        self.file.write_bytes(data)
        try:
            ends_well(main, self.path)
        finally:
            self.file.write_bytes(self.content)


@pytest.fixture(scope='module')
def ranks(vpp, tmp_path_factory):
    made = RankLab(vpp, tmp_path_factory.mktemp('ranks'))
    assert ends_well(main, made.path) == 0
    return made


@examples(20)
@given(st.data())
def test_rank_file_with_damaged_bytes(ranks, data):
    ranks.look(data.draw(damaged_bytes(ranks.content)))


@examples(20)
@given(st.data())
def test_rank_file_with_odd_content(ranks, data):
    ranks.look(saved(data.draw(damaged_object(ranks.state))))


@examples(20)
@given(st.data())
def test_rank_file_with_odd_optimizer_or_arguments(ranks, data):
    key = data.draw(st.sampled_from(('optimizer', 'args')))
    ranks.look(saved({**ranks.state, key: data.draw(damaged_object(ranks.state[key]))}))


@examples(10)
@given(st.data())
def test_rank_file_that_contains_itself(ranks, data):
    ranks.look(data.draw(looped_file(ranks.state)))


# --- what the campaigns found, each once


@pytest.mark.parametrize(
    'change',
    [
        {'content_metadata': {'distrib_optim_sharding_type': 2**40}},
        {'content_metadata': torch.zeros(3)},
        {'iteration': torch.ones(3)},
        {'optimizer': {'param_groups': [{'step': torch.ones(3)}, {'step': math.inf}]}},
        {'args': Namespace(optimizer_cpu_offload=True, optimizer_offload_fraction=10**500)},
        {'args': Namespace(optimizer_cpu_offload=torch.zeros(3))},
        {'args': Namespace(hybrid_layer_pattern=torch.zeros(3))},
        {'args': Namespace(num_layers=torch.zeros(3))},
        {'args': Namespace(padded_vocab_size='x', make_vocab_size_divisible_by=torch.zeros(3))},
        {'args': Namespace(num_attention_heads=torch.zeros(3), no_rope_freq=torch.ones(3))},
        {'args': torch.zeros(3)},
        {'args': Namespace(use_distributed_optimizer=torch.zeros(3)), 'content_metadata': None},
    ],
)
def test_odd_values_in_common_state(lab, change):
    path = lab.paths[0]
    with lab.damaged(path / 'common.pt', saved(lab.common | change)):
        assert ends_well(main, path) == ends_well(main, '--json', path) == 0
        assert ends_well(resume, path) == 0
        dry_run(path)


def test_common_state_in_a_loop(lab):
    state = {'optimizer': {}}
    state['optimizer']['again'] = state['optimizer']
    assert leaked_param_states(state) == []
    with lab.damaged(lab.paths[0] / 'common.pt', saved(state)):
        assert ends_well(main, lab.paths[0]) == ends_well(resume, lab.paths[0]) == 1
        assert dry_run(lab.paths[0]) == 1


def first_place(metadata):
    return next(place for index, place in metadata.storage_data.items() if SETTINGS in index.fqn)


@pytest.mark.parametrize(
    'change',
    [
        lambda m: m.state_dict_metadata.update({10**5000: None}),
        lambda m: setattr(first_place(m), 'offset', 10**5000),
        lambda m: setattr(first_place(m), 'length', 2**62),
        lambda m: setattr(first_place(m), 'relative_path', 'a\0b'),
        lambda m: setattr(first_place(m), 'relative_path', '\ud800'),
    ],
)
def test_odd_entries_in_the_metadata(lab, change):
    """Their messages can't be made, or the files that they name not be asked for."""
    path = lab.paths[0]
    metadata = metadata_of(path)
    change(metadata)
    with lab.damaged(path / '.metadata', pickle.dumps(metadata)):
        look(path, lab.paths[1])
        assert ends_well(main, path) == ends_well(resume, path) == 1


def test_a_key_stays_on_its_line(lab):
    metadata = metadata_of(lab.paths[0])
    weights = metadata.state_dict_metadata
    weights['a\nb\x1b[31m'] = weights['decoder.final_layernorm.weight']
    with lab.damaged(lab.paths[0] / '.metadata', pickle.dumps(metadata)):
        ends_well(resume, lab.paths[0], '--check-weights')


def test_settings_of_an_empty_list(lab):
    with settings_of(lab, saved([])):
        assert ends_well(main, lab.paths[0]) == ends_well(resume, lab.paths[0]) == 0
