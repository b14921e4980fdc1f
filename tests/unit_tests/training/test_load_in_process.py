"""``load_checkpoint`` called as embedding frameworks call it: their objects, their ``get_args``."""

import pkgutil
import shlex
import shutil
import sys
from argparse import Namespace
from unittest import mock

import pytest
import torch
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from megatron.core.models.gpt import GPTModel

from tests.cpu_megatron.arguments import with_defaults
from tests.cpu_megatron.session import Training, distributed_optimizer, gpt, hybrid, model_parallel
from tests.cpu_megatron.torchrun import REPOSITORY
from tests.cpu_megatron.whole_checkpoint import gpt_source, read_tensors
from tests.unit_tests.dist_checkpointing.test_replaced_attention import INDEXER, LATENT_MODEL
from tools.checkpoint.common.directory import find_checkpoint
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.inspect_checkpoint import inspect_checkpoint

RESHARDABLE = ('--ckpt-format=torch_dist', '--dist-ckpt-optim-fully-reshardable')
ARGUMENTS = [*RESHARDABLE, '--use-distributed-optimizer', '--no-load-rng', '--no-save-rng']


@pytest.fixture(autouse=True)
def groups():
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    with model_parallel():
        init_num_microbatches_calculator(0, None, 4, 2, 1)
        yield


@pytest.fixture(autouse=True)
def args(tmp_path, monkeypatch):
    """What ``checkpointing`` takes for the run's arguments; nothing else in the process has any."""
    from megatron.training.arguments import parse_args, validate_args

    paths = [f'--save={tmp_path}/saved', f'--load={tmp_path}/saved']
    monkeypatch.setattr('sys.argv', ['run', *with_defaults('gpt', [*ARGUMENTS, *paths])])
    args = parse_args()
    validate_args(args)
    args.save_tokenizer_assets = False  # there is no tokenizer
    monkeypatch.setattr('megatron.training.checkpointing.get_args', lambda: args)
    return args


class ForeignOptimizer:
    """No more than ``load_checkpoint`` asks an optimizer for; nothing can be set on it."""

    __slots__ = ('loaded',)
    is_stub_optimizer, param_groups = False, ()

    def sharded_state_dict(self, *args, **kwargs):
        return {'number': 7}

    def load_state_dict(self, state):
        self.loaded = state


@pytest.mark.parametrize('build', [gpt, lambda: hybrid('M*-M*-')])
def test_a_load_that_translates_nothing_touches_neither_model_nor_optimizer(build, args):
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    saved, other = build(), build()
    if saved[0].config.is_hybrid_model:
        args.hybrid_layer_pattern = 'M*-M*-'
    save_checkpoint(3, saved, ForeignOptimizer(), None, 0)
    optimizer, set_on_model = ForeignOptimizer(), []
    with mock.patch.object(
        type(other[0]), '__setattr__', lambda self, *what: set_on_model.append(what)
    ):
        assert load_checkpoint(other, optimizer, None)[0] == 3
    assert optimizer.loaded == {'number': 7}
    assert not set_on_model
    for key, value in saved[0].state_dict().items():
        assert value is None or torch.equal(other[0].state_dict()[key], value), key


@pytest.mark.parametrize('finetune', [False, True])
def test_what_a_translating_load_sets_on_an_instance_it_puts_back(finetune, args):
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    source = Training.start(gpt(), distributed_optimizer())
    source.train(1)
    save_checkpoint(3, source.model, source.optimizer, None, 0)
    run = Training.start(hybrid('*-*-'), distributed_optimizer())
    (model,), optimizer = run.model, run.optimizer
    own = {
        owner: mock.Mock(side_effect=owner.load_state_dict, name=str(type(owner)))
        for owner in (model, optimizer)
    }
    for owner, function in own.items():
        owner.load_state_dict = function
    args.hybrid_layer_pattern, args.finetune, args.num_layers = '*-*-', finetune, 4
    assert load_checkpoint(run.model, optimizer, None)[0] == (0 if finetune else 3)
    for owner, function in own.items():
        assert function.call_count == 1
        assert vars(owner)['load_state_dict'] is function
    assert 'reload_model_params' not in vars(optimizer)


@pytest.mark.parametrize('finetune', [False, True])
def test_a_rank_without_parameters_to_train_loads_weights(finetune, args):
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    source = Training.start(gpt(), distributed_optimizer())
    save_checkpoint(3, source.model, source.optimizer, None, 0)
    frozen = hybrid('*-*-')
    frozen[0].requires_grad_(False)
    run = Training.start(frozen, distributed_optimizer())
    assert run.optimizer.is_stub_optimizer
    args.hybrid_layer_pattern, args.finetune, args.num_layers = '*-*-', finetune, 4
    assert load_checkpoint(run.model, run.optimizer, None)[0] == (0 if finetune else 3)
    embeddings = [
        dict(of.model[0].named_parameters())['module.embedding.word_embeddings.weight']
        for of in (source, run)
    ]
    assert torch.equal(*embeddings)


OURS = str(REPOSITORY / 'megatron')


@pytest.mark.parametrize(
    'name',
    [
        'megatron.training.checkpointing.print_rank_0',
        'megatron.training.checkpointing.unwrap_model',
        'megatron.training.checkpointing.dist_checkpointing.load_content_metadata',
        'megatron.core.dist_checkpointing.gpt_checkpoint_interop.gpt_compatible_layer_maps',
    ],
)
def test_what_upstream_looks_up_is_looked_up_there(name, args):
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    source = Training.start(gpt(), distributed_optimizer())
    save_checkpoint(3, source.model, source.optimizer, None, 0)
    run = Training.start(hybrid('*-*-'), distributed_optimizer())
    args.hybrid_layer_pattern, args.num_layers = '*-*-', 4
    real, callers = pkgutil.resolve_name(name), []

    def replacement(*arguments, **options):
        callers.append(sys._getframe(1).f_code.co_filename)
        return real(*arguments, **options)

    with mock.patch(name, replacement):
        assert load_checkpoint(run.model, run.optimizer, None)[0] == 3
    assert any(caller.startswith(OURS) for caller in callers), callers


def test_a_replaced_hybrid_model_is_what_a_run_is_compared_with(args):
    from megatron.training.checkpointing import _maybe_setup_gpt_to_hybrid_load

    args.hybrid_layer_pattern, saved = '*-*-', Namespace(num_layers=2)
    maps, _ = _maybe_setup_gpt_to_hybrid_load(args, saved, hybrid('*-*-'))
    assert maps.num_gpt_layers == 2
    with mock.patch('megatron.core.models.hybrid.hybrid_model.HybridModel', Training):
        found = _maybe_setup_gpt_to_hybrid_load(args, saved, gpt())
    assert found == (None, False)
    with mock.patch('megatron.core.models.hybrid.hybrid_model.HybridModel', GPTModel):
        maps, _ = _maybe_setup_gpt_to_hybrid_load(args, saved, gpt())
    assert maps.num_gpt_layers == 2


def test_where_only_arguments_are_known_the_optimizer_state_is_not_refused(args):
    from megatron.training.checkpointing import _maybe_setup_gpt_to_hybrid_load

    saved = Namespace(num_layers=2, use_distributed_optimizer=True, ckpt_fully_parallel_save=True)
    assert _maybe_setup_gpt_to_hybrid_load(args, saved, gpt()) == (None, False)


class LocalCheckpoints:
    """In place of nvidia-resiliency-ext's manager: one checkpoint, in memory."""

    def __init__(self, state_dict):
        sharded, common = save_preprocess(state_dict)
        self.checkpoint = MCoreTensorAwareStateDict(common, sharded)

    def find_latest(self):
        return 3

    def load(self):
        return self.checkpoint, 'local_3'


def test_a_local_checkpoint(args):
    from megatron.training import checkpointing

    args.non_persistent_ckpt_type, args.non_persistent_local_ckpt_algo = 'local', 'atomic'
    source, run = (Training.start(gpt(), distributed_optimizer()) for _ in range(2))
    source.train(2)
    metadata = {'metadata': checkpointing._build_sharded_state_dict_metadata(args)}
    state = checkpointing.generate_state_dict(
        args,
        checkpointing.unwrap_model(source.model),
        source.optimizer,
        None,
        None,
        iteration=3,
        optim_sd_kwargs=metadata,
        model_sd_kwargs=metadata,
    )
    context = {'local_checkpoint_manager': LocalCheckpoints(state)}
    loaded = checkpointing.load_checkpoint(
        run.model, run.optimizer, None, checkpointing_context=context
    )
    assert loaded[0] == 3
    run.iteration = source.iteration
    assert run.train(2) == source.train(2)


@pytest.mark.parametrize('strictness', ['return_all', 'return_unexpected'])
def test_a_load_that_returns_what_does_not_match(strictness, args, capsys):
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    source, run = (Training.start(gpt(), distributed_optimizer()) for _ in range(2))
    source.train(2)
    save_checkpoint(3, source.model, source.optimizer, None, 0)
    args.dist_ckpt_strictness, args.no_load_optim = strictness, True
    assert load_checkpoint(run.model, run.optimizer, None)[0] == 3
    told = 'are only in the checkpoint and not loaded, such as optimizer.state.exp_avg.decoder.'
    assert (told in capsys.readouterr().out) == (strictness == 'return_all')
    for own, saved in zip(run.model[0].parameters(), source.model[0].parameters(), strict=True):
        assert torch.equal(own, saved)


@pytest.mark.parametrize('distributed', [True, False])
def test_a_run_that_has_stepped_forgets_the_moments_of_fresh_layers(distributed, args, tmp_path):
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    options = {'bf16': True, 'use_distributed_optimizer': distributed}
    args.use_distributed_optimizer = distributed
    source = Training.start(gpt(bf16=True), distributed_optimizer(**options))
    source.train(1)
    save_checkpoint(3, source.model, source.optimizer, None, 0)
    run = Training.start(hybrid('M*-*-', bf16=True), distributed_optimizer(**options))
    run.train(1)
    args.save = str(tmp_path / 'before')
    save_checkpoint(3, run.model, run.optimizer, None, 0)
    args.hybrid_layer_pattern, args.num_layers = 'M*-*-', 5
    load_checkpoint(run.model, run.optimizer, None)
    args.save = str(tmp_path / 'after')
    save_checkpoint(3, run.model, run.optimizer, None, 0)
    stored, before, after = (
        read_tensors(f'{tmp_path}/{name}/iter_0000003') for name in ('saved', 'before', 'after')
    )
    fresh = {key for key in after if 'decoder.layers.0.' in key}
    moments = {key for key in fresh if '.exp_avg' in key}
    assert len(moments) * 2 == len(fresh)  # beside the weights and their main parameters
    for key, value in after.items():
        if key in moments:
            assert before[key].any() and not value.any(), key
        else:
            source = before[key] if key in fresh else gpt_source(stored, key, 'M*-*-')
            assert torch.equal(value, source), key


@pytest.mark.parametrize('bf16', [True, False])
def test_the_indexer_of_sparse_attention_stays_fresh_with_optimizer_state(bf16, args, tmp_path):
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    latent = LATENT_MODEL | {'bf16': bf16}
    source = Training.start(gpt(**latent), distributed_optimizer(bf16=bf16))
    source.train(1)
    save_checkpoint(3, source.model, source.optimizer, None, 0)
    run = Training.start(hybrid('M-D-', **latent, **INDEXER), distributed_optimizer(bf16=bf16))
    args.save = str(tmp_path / 'before')
    save_checkpoint(3, run.model, run.optimizer, None, 0)
    args.hybrid_layer_pattern, args.num_layers = 'M-D-', 4
    args.replace_gpt_attention = True
    load_checkpoint(run.model, run.optimizer, None)
    args.save = str(tmp_path / 'after')
    save_checkpoint(3, run.model, run.optimizer, None, 0)
    stored, before, after = (
        read_tensors(f'{tmp_path}/{name}/iter_0000003') for name in ('saved', 'before', 'after')
    )
    counted = {'fresh': 0, 'moments': 0, 'read': 0}
    for key, value in after.items():
        if 'decoder.layers.0.' in key or '.indexer.' in key:
            kind = 'moments' if '.exp_avg' in key else 'fresh'
            assert torch.equal(value, before[key]), key
            assert kind == 'fresh' or not value.any(), key
        else:
            kind, part = 'read', key.replace('final_norm.', 'final_layernorm.')
            for layer, gpt_layer in ((1, 0), (2, 1), (3, 1)):
                if f'decoder.layers.{layer}.' in part:
                    part = part.replace(f'layers.{layer}.', 'layers.')
                    assert torch.equal(value, stored[part][gpt_layer]), key
                    break
            else:
                assert torch.equal(value, stored[part]), key
        counted[kind] += 1
    assert all(counted.values()) and counted['moments'] == counted['fresh']


@pytest.mark.parametrize(
    'stored_format, finetune',
    [('reshardable', False), ('buckets', True), ('none', False), ('no args say so', False)],
)
@pytest.mark.parametrize(
    'of, into', [(gpt, lambda: hybrid('M*-*-')), (lambda: hybrid('*-*-'), gpt)]
)
def test_a_program_without_optimizer_loads_weights(of, into, finetune, stored_format, args):
    """To generate text, to export: whatever optimizer state there is, it is not asked for."""
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    source = Training.start(of(), distributed_optimizer())
    source.train(1)
    args.dist_ckpt_optim_fully_reshardable = stored_format == 'reshardable'
    args.no_save_optim = stored_format == 'none'
    from_hybrid = source.config.is_hybrid_model
    args.hybrid_layer_pattern, args.num_layers = ('*-*-', 4) if from_hybrid else (None, 2)
    optimizer = None if stored_format == 'no args say so' else source.optimizer
    save_checkpoint(3, source.model, optimizer, None, 0)
    target = into()
    pattern = (None, 2) if from_hybrid else ('M*-*-', 5)
    args.hybrid_layer_pattern, args.num_layers = pattern
    args.finetune, args.use_distributed_optimizer, args.no_save_optim = finetune, False, False
    assert load_checkpoint(target, None, None)[0] == (0 if finetune else 3)
    found = target[0].state_dict()['embedding.word_embeddings.weight']
    stored = read_tensors(f'{args.save}/iter_0000003')['embedding.word_embeddings.weight']
    assert torch.equal(found, stored)


@pytest.mark.parametrize('into', [gpt, lambda: hybrid('M*-*-')])
def test_arguments_saved_as_a_dict_say_the_same(into, args, monkeypatch):
    from megatron.training import checkpointing

    source = Training.start(gpt(), distributed_optimizer())
    source.train(1)
    generate = checkpointing.generate_state_dict

    def with_a_dict(*arguments, **options):
        state = generate(*arguments, **options)
        return state | {'args': dict(vars(state['args']))}

    args.consumed_train_samples = 12
    with monkeypatch.context() as saving:
        saving.setattr(checkpointing, 'generate_state_dict', with_a_dict)
        checkpointing.save_checkpoint(3, source.model, source.optimizer, None, 0)
    run = Training.start(into(), distributed_optimizer())
    args.consumed_train_samples = 0
    if run.config.is_hybrid_model:
        args.hybrid_layer_pattern, args.num_layers = 'M*-*-', 5
    assert checkpointing.load_checkpoint(run.model, run.optimizer, None)[0] == 3
    assert args.consumed_train_samples == 12
    assert inspect_checkpoint(args.load).parallel['TP'] == 1
    args.num_layers, args.num_attention_heads = 7, 8
    with pytest.raises((AssertionError, RuntimeError), match='num_attention_heads|num_layers'):
        checkpointing.load_checkpoint(run.model, run.optimizer, None)


TRACKER = 'latest_checkpointed_iteration.txt'


def loaded_directory(args, *options):
    """The directory and type of the checkpoint that megatron loads, given these options."""
    from megatron.training import checkpointing

    given = dict(zip(options[::2], options[1::2], strict=True))
    with mock.patch.object(args, 'ckpt_step', int(given.get('--ckpt-step', 0)) or None):
        _, found, _, kind = checkpointing._load_base_checkpoint(given['--load'], args, rank0=True)
    parts = found.partition('/mp_rank_')[0] if kind is not None else None
    return parts, kind


@pytest.mark.parametrize('format_', ['torch_dist', 'torch'])
@pytest.mark.parametrize('latest', ['2', '1', 'release', None])
def test_a_path_means_what_it_means_to_load(format_, latest, args, tmp_path):
    from megatron.training.checkpointing import save_checkpoint

    root = tmp_path / "a user's"
    args.save, args.ckpt_format = str(root), format_
    args.use_dist_ckpt = format_ != 'torch'
    for iteration in (1, 2):
        save_checkpoint(iteration, gpt(), None, None, 0)
    shutil.copytree(root / 'iter_0000001', root / 'release')
    tracker = root / TRACKER
    tracker.unlink() if latest is None else tracker.write_text(f'{latest}\n')
    for path in (root, root / 'iter_0000001', root / 'iter_0000002', root / 'release'):
        taken, kind = loaded_directory(args, '--load', str(path))
        try:
            found = find_checkpoint(path)
        except CheckpointError:
            assert kind is None and path == root
            continue
        assert found.given_to_load == (kind is not None)
        if kind is not None:
            assert taken == str(found.directory) and found.format == format_
            assert kind.name == {'torch': 'LEGACY', 'torch_dist': 'GLOBAL'}[format_]
            assert found.load == shlex.join(['--load', str(root)])
        elif found.load:
            assert loaded_directory(args, *shlex.split(found.load))[0] == str(path)
        else:
            assert latest == 'release' or path == root / 'release'
    for step in (1, 2, 3):
        chosen = ['--load', str(root), '--ckpt-step', str(step)]
        if step == 3 and latest != 'release':
            with pytest.raises(CheckpointError, match='iterations in .*: 1, 2, release'):
                find_checkpoint(root, step)
            continue
        found = find_checkpoint(root, step)
        assert loaded_directory(args, *chosen)[0] == str(found.directory)
        assert found.given_to_load and found.load == shlex.join(chosen)


def test_an_unfinished_checkpoint_is_none(args, tmp_path):
    from megatron.training.checkpointing import save_checkpoint

    save_checkpoint(1, gpt(), ForeignOptimizer(), None, 0)
    (tmp_path / 'saved/iter_0000001/metadata.json').unlink()
    with pytest.raises(CheckpointError, match='unfinished'):
        find_checkpoint(tmp_path / 'saved')
    with pytest.raises(BaseException, match='Missing key in checkpoint state_dict: args'):
        loaded_directory(args, '--load', args.load)
