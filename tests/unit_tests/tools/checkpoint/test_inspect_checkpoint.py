"""What the inspector tells of checkpoints that real megatron-core wrote."""

import json
import shutil
from argparse import Namespace

import pytest
import torch
from megatron.training import checkpointing
from torch.distributed import checkpoint as dcp

from tests.cpu_megatron.whole_checkpoint import ALONE, read_tensors
from tests.unit_tests.tools.checkpoint.handmade import (
    model_tensors,
    set_common_form,
    write_checkpoint,
)
from tests.unit_tests.tools.checkpoint.inspect_runs import TRACKER
from tests.unit_tests.tools.checkpoint.pp_vpp_damage import edit, exchange, narrow, pop, put
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.convert_ckpt_pp_vpp import main as convert
from tools.checkpoint.inspect_checkpoint import inspect_checkpoint
from tools.checkpoint.inspection import uses
from tools.checkpoint.inspection.gpt_into_hybrid import dry_run
from tools.checkpoint.inspection.resume import read_resume_report
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

# of checkpoints that weren't written by `megatron.training`
NO_RNG = 'The checkpoint has no random state; pass --no-load-rng to start it fresh.'


def use(summary, name):
    (found,) = [item for item in summary.uses if item.name == name]
    return found.works, found.reason


def sizes(tensors):
    """Tensors and bytes by dtype, counted on the tensors themselves."""
    found = {}
    for tensor in tensors:
        count, size = found.get(str(tensor.dtype), (0, 0))
        found[str(tensor.dtype)] = count + 1, size + tensor.numel() * tensor.element_size()
    return found


def stated(amounts):
    return {f'torch.{name}': (amount.tensors, amount.bytes) for name, amount in amounts.items()}


@pytest.mark.parametrize(
    'name', ['gpt', 'gpt/iter_0000001', 'buckets', 'plain', 'moe', 'moe run', 'mixed', 'hybrid']
)
def test_dtypes_and_bytes_are_those_of_the_tensors(real, name):
    summary = inspect_checkpoint(real / name)
    tensors = read_tensors(str(summary.directory))
    training = {key for key in tensors if key.startswith(('optimizer', 'chained'))}
    assert stated(summary.weights) == sizes(
        tensor for key, tensor in tensors.items() if key not in training
    )
    assert stated(summary.optimizer.amounts) == sizes(tensors[key] for key in training)
    files = [path for path in summary.directory.iterdir() if path.is_file()]
    assert (summary.files, summary.file_bytes) == (
        len(files),
        sum(len(path.read_bytes()) for path in files),
    )
    assert json.loads(json.dumps(summary.as_json()))['format'] == 'torch_dist'
    assert str(summary).count('\n') == 16


@pytest.mark.loads
def test_gpt_with_optimizer(real):
    summary = inspect_checkpoint(real / 'gpt')
    assert summary.directory == real / 'gpt/iter_0000002'
    assert (summary.format, summary.iteration, summary.manifest_files) == ('torch_dist', 2, None)
    model = summary.model
    assert (model.family, model.layers, model.stored_by) == ('gpt', 2, 'axis')
    assert (model.dense, model.moe, model.pattern) == (2, 0, None)
    assert 'GPT, 2 layers in stacked tensors, 2 dense MLPs, by' in str(summary)
    assert summary.weights.keys() == {'bfloat16'}
    assert (summary.optimizer.format, summary.optimizer.steps) == ('fully_reshardable', [2])
    assert summary.parallel == {} and 'no arguments are stored' in str(summary)
    assert use(summary, uses.MERGE)[0] and '--model-only' in use(summary, uses.MERGE)[1]
    assert use(summary, uses.CONVERTER) == (
        False,
        'not needed: torch_dist loads into any pipeline layout as it is',
    )
    assert use(summary, uses.INTEROP) == (
        True,
        "patterns with 2 '*' and 2 '-', or fewer '*' with --replace-gpt-attention; "
        f'optimizer state too; {NO_RNG}',
    )
    assert use(summary, uses.RESUME)[0]


@pytest.mark.loads
def test_versions_of_vendors_and_local_builds(real, monkeypatch):
    told = str(inspect_checkpoint(real / 'gpt'))
    for version in '2.8.0a0+34c6371d24.nv25.08', '2.9.1+cu128', '2.10.0.dev20250901':
        monkeypatch.setattr(torch, '__version__', version)
        assert str(inspect_checkpoint(real / 'gpt')) == told


@pytest.mark.loads
def test_optimizer_formats(real):
    summary = inspect_checkpoint(real / 'buckets')
    assert summary.optimizer.format == 'dp_reshardable'
    assert (
        'after a conversion, or with --no-load-optim: The optimizer state of the checkpoint is '
        "'dp_reshardable'" in use(summary, uses.INTEROP)[1]
    )
    assert 'only the data-parallel size may change' in use(summary, uses.RESUME)[1]
    summary = inspect_checkpoint(real / 'plain')
    assert summary.optimizer.format == 'plain'
    assert 'too, without --use-distributed-optimizer;' in use(summary, uses.INTEROP)[1]


@pytest.mark.loads
def test_experts_and_a_model_alone(real):
    summary = inspect_checkpoint(real / 'moe')
    assert (summary.model.stored_by, summary.model.dense, summary.model.moe) == ('axis', 0, 2)
    assert summary.weights.keys() == {'bfloat16', 'float32'}
    assert (summary.optimizer.format, summary.iteration) == ('none', 7)
    assert summary.parallel == {'TP': 2, 'PP': 4, 'ranks': 16}
    assert use(summary, uses.MERGE) == (True, '')
    assert '--no-load-optim' in use(summary, uses.INTEROP)[1]
    assert use(summary, uses.RESUME) == (
        False,
        'no optimizer state; load with --no-load-optim --no-load-rng',
    )
    optimizer = inspect_checkpoint(real / 'moe run').optimizer
    assert (optimizer.format, optimizer.steps) == ('fully_reshardable', [1])
    mixed = inspect_checkpoint(real / 'mixed')
    assert (mixed.model.stored_by, mixed.model.dense, mixed.model.moe) == ('index', 1, 1)
    assert 'GPT, 2 layers in tensors of their own, 1 dense and 1 MoE MLPs, by' in str(mixed)
    assert "2 '*', 1 '-' and 1 'E', the MLPs in the order -E" in use(mixed, uses.INTEROP)[1]


@pytest.mark.loads
def test_hybrid(real):
    summary = inspect_checkpoint(real / 'hybrid')
    assert (summary.model.family, summary.model.pattern) == ('hybrid', 'M*-M*E')
    taken, reason = use(summary, uses.REVERSE)
    assert not taken and "layer 0, 'M'" in reason


def test_common_state_forms(tmp_path):
    directory = write_checkpoint(tmp_path / 'iter_0000003', model_tensors(3))
    for form, expected in (
        ('legacy', 'common.pt'),
        ('embedded', 'common_state/shard_0_1'),
        (None, 'none'),
    ):
        set_common_form(directory, {'iteration': 5}, form)
        summary = inspect_checkpoint(directory)
        assert (summary.common_state, summary.iteration) == (expected, 3 if form is None else 5)


def test_manifest(real, tmp_path):
    out = merge([real / 'moe'], [1.0], tmp_path / 'out', save_integrity=True).output_dir
    summary = inspect_checkpoint(out)
    assert summary.manifest_files == summary.files - 1
    (out / 'common.pt').rename(tmp_path / 'common.pt')
    with pytest.raises(CheckpointError, match='common.pt: no such file, but integrity.json names'):
        inspect_checkpoint(out)


@pytest.mark.loads
def test_fsdp_dtensor_is_named(tmp_path, capsys):
    layers = {
        f'decoder.layers.{i}.{name}': torch.ones(4)
        for i in range(3)
        for name in ('self_attention.linear_qkv.weight', 'mlp.linear_fc1.weight')
    }
    model = {f'module.module.{key}': value for key, value in layers.items()}
    state = {key: {'exp_avg': torch.ones(4)} for key in model}
    dcp.save(
        {'model': model, 'optimizer': {'state': state}},
        storage_writer=dcp.FileSystemWriter(tmp_path / 'iter_0000009'),
        **ALONE,
    )
    summary = inspect_checkpoint(tmp_path / 'iter_0000009')
    assert (summary.format, summary.optimizer.format) == ('fsdp_dtensor', 'fsdp_dtensor')
    assert (summary.model.family, summary.model.layers, summary.iteration) == ('gpt', 3, 9)
    works, reason = use(summary, uses.INTEROP)
    # as the load
    assert works == hasattr(checkpointing.upstream, '_maybe_setup_gpt_to_hybrid_load')
    assert ('optimizer state too' if works else 'from megatron-core 0.19 on') in reason
    assert not use(summary, uses.MERGE)[0] and 'fsdp_dtensor' in use(summary, uses.MERGE)[1]
    (tmp_path / TRACKER).write_text('9')
    assert dry_run(str(tmp_path), '*-*-*-') == int(not works)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == 'Will load, with its optimizer state.' if works else '0.19 on' in last


@pytest.mark.loads
@pytest.mark.parametrize(
    'name, args, kind',
    [
        ('gpt/iter_0000002', {'use_distributed_optimizer': True}, 'fully_sharded_model_space'),
        ('gpt/iter_0000002', {}, 'fully_sharded_model_space'),
        ('buckets', {}, 'dp_reshardable'),
        ('plain', {}, 'plain'),
    ],
)
def test_every_look_says_the_same_without_content_metadata(
    name, args, kind, real, tmp_path, capsys
):
    copy = shutil.copytree(real / name, tmp_path / 'iter_0000002')
    args = Namespace(**args, num_layers=2, no_save_optim=False)
    set_common_form(copy, {'iteration': 2, 'args': args}, 'legacy')
    (tmp_path / TRACKER).write_text('2')
    summary = inspect_checkpoint(tmp_path)
    assert summary.load == f'--load {tmp_path} --no-load-rng'
    assert summary.optimizer.format == read_resume_report(tmp_path).sharding_type == kind
    assert dry_run(str(tmp_path), '*-*-') == 0
    *_, stored, verdict = capsys.readouterr().out.splitlines()
    assert stored == f'Optimizer state: {kind}'
    _, reason = use(summary, uses.INTEROP)
    if kind == 'plain':
        assert 'too, without --use-distributed-optimizer' in reason
        assert verdict == (
            'Will load, with its optimizer state in a run without --use-distributed-optimizer. '
            + NO_RNG
        )
    else:
        refused = f'The optimizer state of the checkpoint is {kind!r}'
        way_out = f'convert_ckpt_optimizer.py --load-dir {copy}'
        for text in (reason, verdict):
            assert refused in text and way_out in text and '--no-load-optim' in text


def test_legacy_with_virtual_stages(vpp, tmp_path):
    summary = inspect_checkpoint(vpp)
    assert (summary.format, summary.iteration) == ('torch', 2)
    assert (summary.model.family, summary.model.layers, summary.model.dense) == ('gpt', 4, 4)
    assert summary.parallel == {'TP': 1, 'PP': 2, 'VPP': 2, 'CP': 1, 'DP': 1, 'ranks': 2}
    states = [torch.load(path) for path in sorted(vpp.glob('iter_*/mp_rank_*/*.pt'))]
    assert stated(summary.weights) == sizes(
        value
        for state in states
        for key in ('model0', 'model1')
        for value in state[key].values()
        if isinstance(value, torch.Tensor)
    )
    assert summary.optimizer.format == 'in rank files' and summary.optimizer.amounts
    assert use(summary, uses.CONVERTER) == (True, 'split, reshape')
    assert use(summary, uses.RESUME) == (True, 'with the same TP, PP, VPP and EP')
    assert not use(summary, uses.MERGE)[0] and not use(summary, uses.INTEROP)[0]
    renamed = tmp_path / 'a copy'
    shutil.copytree(summary.directory, renamed)
    assert use(inspect_checkpoint(renamed), uses.CONVERTER)[0]
    (renamed / 'mp_rank_00_001/distrib_optim.pt').touch()
    assert '--drop-optimizer' in use(inspect_checkpoint(renamed), uses.CONVERTER)[1]
    shutil.rmtree(renamed / 'mp_rank_00_001')
    half = inspect_checkpoint(renamed)
    assert not use(half, uses.CONVERTER)[0]
    assert 'pipeline stage 1 is missing' in use(half, uses.CONVERTER)[1]
    assert 'edge/cloud' in use(half, uses.CONVERTER)[1]
    goes_on, reason = use(half, uses.RESUME)
    assert not goes_on and use(half, uses.CONVERTER)[1].startswith(reason)


@pytest.mark.parametrize(
    'lost, reason', [('*_002', 'pipeline stage 2 is missing'), ('01_*', 'tensor-parallel rank 1')]
)
def test_a_lost_rank_is_told_of_a_resume_too(pp4_tp2, tmp_path, lost, reason):
    root = shutil.copytree(pp4_tp2, tmp_path / 'source')
    assert use(inspect_checkpoint(root), uses.RESUME)[0]
    for directory in root.glob(f'iter_*/mp_rank_{lost}'):
        shutil.rmtree(directory)
    for name in (uses.CONVERTER, uses.RESUME):
        works, found = use(inspect_checkpoint(root), name)
        assert not works and reason in found


@pytest.mark.parametrize('change', [pop('optimizer'), put(None, 'optimizer')])
def test_a_rank_without_optimizer_state_does_not_resume(pp4, tmp_path, change):
    root = shutil.copytree(pp4, tmp_path / 'source')
    edit(change, '00_002')(root)
    works, reason = use(inspect_checkpoint(root), uses.RESUME)
    assert not works and 'mp_rank_00_002' in reason and '--no-load-optim' in reason


@pytest.mark.parametrize('drop', [[], ['--drop-optimizer']])
def test_converter_agrees(vpp, tmp_path, drop):
    """What the inspector says of an optimizer state that can't be told apart is what happens."""
    root = tmp_path / 'source'
    shutil.copytree(vpp, root)
    path = next(root.glob('iter_*/mp_rank_00_001')) / 'model_optim_rng.pt'
    state = torch.load(path)
    state['optimizer'] = {'unknown': 1}
    torch.save(state, path)
    works, reason = use(inspect_checkpoint(root), uses.CONVERTER)
    assert works and reason.startswith('with --drop-optimizer: ')
    words = ['split', '--load-dir', str(root), '--save-dir', str(tmp_path / 'out'), '--dry-run']
    assert convert([*words, *drop]) == (0 if drop else 1)


@pytest.mark.parametrize(
    'change, reason',
    [
        (exchange('00_001', '00_002'), 'the directories are exchanged'),
        (exchange('00_002', '00_003'), 'the stages are not in model order'),
        (edit(put(5, 'args', 'seed'), '00_001'), 'the files are of different runs'),
        (edit(narrow('linear_fc1.weight'), '00_002'), 'the files are of different models'),
        (edit(pop('optimizer'), '00_002'), 'with --drop-optimizer: '),
    ],
)
def test_converter_agrees_on_what_belongs_together(pp4, tmp_path, change, reason, capsys):
    root = shutil.copytree(pp4, tmp_path / 'source')
    change(root)
    works, said = use(inspect_checkpoint(root), uses.CONVERTER)
    assert reason in said and works == ('--drop' in reason)
    words = ['merge', '--load-dir', str(root), '--save-dir', str(tmp_path / 'out')]
    assert convert([*words, '--pipeline-size', '2', '--dry-run']) == 1
    if not works:
        dropped = convert([*words, '--pipeline-size', '2', '--dry-run', '--drop-optimizer'])
        error = capsys.readouterr().err.splitlines()[-1].removeprefix('error: ')
        assert dropped == 1 and error == said
