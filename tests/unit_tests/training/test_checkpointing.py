"""``load_checkpoint``: which checkpoints go into which run, and what a user is told otherwise."""

import json
import pickle
import re
import shutil

import pytest
from megatron.core.dist_checkpointing.key_arguments import LEGACY_WAY_OUT

from tests.cpu_megatron import warm

DISTRIBUTED = ['--ckpt-format=torch_dist', '--use-distributed-optimizer']
RESHARDABLE = [*DISTRIBUTED, '--dist-ckpt-optim-fully-reshardable']
TRACKER = 'latest_checkpointed_iteration.txt'
SHORT = ['--exit-interval=1', '--save-interval=1']

CHECKPOINTS = {
    'gpt': ['gpt', *RESHARDABLE],
    'gpt of 3 layers': ['gpt', *RESHARDABLE, '--num-layers=3'],
    'gpt untied': ['gpt', *RESHARDABLE, '--untie-embeddings-and-output-weights'],
    'gpt with wider MLPs': ['gpt', *RESHARDABLE, '--ffn-hidden-size=96'],
    'legacy gpt': ['gpt', '--ckpt-format=torch'],
    'legacy hybrid': ['hybrid', '--ckpt-format=torch', '--hybrid-layer-pattern=*-*-'],
    'gpt in buckets': ['gpt', *DISTRIBUTED],
    'gpt without optimizer': ['gpt', *RESHARDABLE, '--no-save-optim'],
    'gpt, optimizer not distributed': ['gpt', '--ckpt-format=torch_dist'],
    'hybrid': ['hybrid', *RESHARDABLE, '--hybrid-layer-pattern=*-*-'],
    'hybrid in another order': ['hybrid', *RESHARDABLE, '--hybrid-layer-pattern=**--'],
    'hybrid with mamba': ['hybrid', *RESHARDABLE, '--hybrid-layer-pattern=M*-M*-'],
    'hybrid of unequal counts': ['hybrid', *RESHARDABLE, '--hybrid-layer-pattern=*-*'],
    'hybrid of 3 pairs': ['hybrid', *RESHARDABLE, '--hybrid-layer-pattern=*-*-*-'],
    'hybrid untied': [
        *('hybrid', *RESHARDABLE, '--hybrid-layer-pattern=*-*-'),
        '--untie-embeddings-and-output-weights',
    ],
    'hybrid in buckets': ['hybrid', *DISTRIBUTED, '--hybrid-layer-pattern=*-*-'],
    'hybrid without optimizer': [
        *('hybrid', *RESHARDABLE, '--hybrid-layer-pattern=*-*-', '--no-save-optim'),
    ],
}
WITH_OTHER_ARGUMENTS = {
    'hybrid without a pattern': ({'hybrid_layer_pattern': None}, CHECKPOINTS['hybrid']),
    'hybrid with the old name': (
        {'hybrid_layer_pattern': None, 'hybrid_override_pattern': '*-*-'},
        CHECKPOINTS['hybrid'],
    ),
    'gpt that says hybrid': ({'hybrid_layer_pattern': '*-*-'}, CHECKPOINTS['gpt']),
    'hybrid of another pattern': ({'hybrid_layer_pattern': '**--'}, CHECKPOINTS['hybrid']),
    'hybrid of two patterns': ({'hybrid_override_pattern': '**--'}, CHECKPOINTS['hybrid']),
}
# name -> the stacked tensor that lacks a layer
INCOMPLETE = {
    'gpt without a weight of layer 1': 'decoder.layers.mlp.linear_fc2.weight',
    'gpt without a moment of layer 1': (
        'optimizer.state.exp_avg.decoder.layers.self_attention.linear_proj.weight'
    ),
}
# name -> the checkpoint that is published as a release
RELEASES = {
    'gpt release': 'gpt in buckets',
    'gpt release without optimizer': 'gpt without optimizer',
    'hybrid release': 'hybrid in buckets',
    'hybrid release without optimizer': 'hybrid without optimizer',
}


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp('checkpoints')
    tasks = [
        {
            'name': name,
            'kind': kind,
            'arguments': [*arguments, *SHORT, '--save', str(root / name)],
            'result': str(root / f'{name}.result'),
        }
        for name, (kind, *arguments) in CHECKPOINTS.items()
    ]
    (root / 'tasks').write_text(json.dumps(tasks))
    warm.run(1, 'tests.unit_tests.optimizer.resume_runs', str(root / 'tasks'))
    unfinished = [name for name in CHECKPOINTS if not (root / name / TRACKER).is_file()]
    assert not unfinished
    for name, (changes, arguments) in WITH_OTHER_ARGUMENTS.items():
        warm.run(
            1,
            'tests.unit_tests.training.save_with_args',
            json.dumps(changes),
            *arguments,
            *SHORT,
            '--save',
            str(root / name),
        )
    for name, key in INCOMPLETE.items():
        shutil.copytree(root / 'gpt', root / name)
        drop_last_layer(root / name / 'iter_0000001' / '.metadata', key)
    for name, original in RELEASES.items():
        shutil.copytree(root / original / 'iter_0000001', root / name / 'release')
        (root / name / TRACKER).write_text('release')
    return root


def drop_last_layer(file, key):
    """Let the metadata forget the last layer's part of ``key``, as if no rank had written it."""
    metadata = pickle.loads(file.read_bytes())
    chunks = metadata.state_dict_metadata[key].chunks
    (last,) = [chunk for chunk in chunks if chunk.offsets[0] == 1]
    chunks.remove(last)
    file.write_bytes(pickle.dumps(metadata))


def attempt(cases, checkpoints, tmp_path, *arguments, nproc=1):
    for settings in cases.values():
        settings['load'] = str(checkpoints / settings['load'])
    output = warm.run(
        nproc,
        'tests.unit_tests.training.refusals',
        f'{tmp_path}/out.json',
        json.dumps(cases),
        *arguments,
    )
    return json.loads((tmp_path / 'out.json').read_text()), output


# name of the attempt -> (arguments that differ, what the message has to say)
HYBRID_RUN = {
    'other number of layers': ({'load': 'gpt of 3 layers'}, 'RuntimeError: .*3 layers'),
    'state in buckets': (
        {'load': 'gpt in buckets'},
        "RuntimeError: .*'dp_reshardable'.*convert_ckpt_optimizer.py --load-dir .*--no-load-optim",
    ),
    'optimizer not distributed': (
        {'load': 'gpt, optimizer not distributed'},
        'RuntimeError: .*not distributed.*--no-load-optim',
    ),
    'run without distributed optimizer': (
        {'load': 'gpt', 'use_distributed_optimizer': False},
        'RuntimeError: .*--use-distributed-optimizer',
    ),
    'no optimizer': (
        {'load': 'gpt without optimizer'},
        'RuntimeError: .*no optimizer state.*--no-load-optim',
    ),
    'untied': (
        {'load': 'gpt untied', 'no_load_optim': True},
        'CheckpointingException: output_layer.weight: .*--untie-embeddings',
    ),
    'other sizes': (
        {'load': 'gpt with wider MLPs', 'no_load_optim': True},
        r'CheckpointingException: decoder.layers.mlp.linear_fc\S*: its shape is \(2, .*\) in the '
        r'model and \(2, .*96.*--ffn-hidden-size',
    ),
    'legacy': (
        {'load': 'legacy gpt', 'no_load_optim': True},
        r'RuntimeError: \S+/legacy \w+/iter_0000001: legacy torch checkpoints.*' + LEGACY_WAY_OUT,
    ),
    # where megatron looks at nothing before it loads
    'legacy, finetune': (
        {'load': 'legacy gpt', 'ckpt_format': 'torch', 'finetune': True},
        r'RuntimeError: \S+/legacy \w+/iter_0000001: legacy torch checkpoints.*' + LEGACY_WAY_OUT,
    ),
    'pattern missing': (
        {'load': 'gpt', 'hybrid_layer_pattern': None},
        'RuntimeError: .*--hybrid-layer-pattern',
    ),
    'pattern unbalanced': (
        {'load': 'gpt', 'hybrid_layer_pattern': '*-*'},
        r"RuntimeError: .*'\*-\*'.*2 attention",
    ),
    'contradiction': (
        {'load': 'gpt that says hybrid'},
        r"RuntimeError: .*contradicts.*'\*-\*-'.*decoder.final_layernorm",
    ),
}
# what megatron makes of `--optimizer muon --use-distributed-optimizer`
BY_LAYERS = {'use_distributed_optimizer': False, 'use_layer_wise_distributed_optimizer': True}
HYBRID_CONTRADICTIONS = {
    'another pattern': (
        {'load': 'hybrid of another pattern'},
        r"RuntimeError: .*contradicts.*'\*\*--'.*keys are of layers '\*-\*-'",
    ),
    'two patterns': (
        {'load': 'hybrid of two patterns'},
        r"RuntimeError: .*contradicts.*'\*-\*-' and '\*\*--'.*decoder.final_norm",
    ),
}
HYBRID_RUN |= HYBRID_CONTRADICTIONS
LOADS = {
    'gpt': {'load': 'gpt'},
    'gpt in buckets, weights only': {'load': 'gpt in buckets', 'no_load_optim': True},
    'gpt without optimizer, weights only': {'load': 'gpt without optimizer', 'no_load_optim': True},
    'gpt, finetune': {'load': 'gpt', 'finetune': True},
    'gpt without optimizer, finetune': {'load': 'gpt without optimizer', 'finetune': True},
    'gpt, a run distributed by layers': {'load': 'gpt', **BY_LAYERS},
    'gpt release': {'load': 'gpt release'},
    'gpt release without optimizer': {'load': 'gpt release without optimizer'},
    'hybrid': {'load': 'hybrid'},
    'hybrid without a pattern': {'load': 'hybrid without a pattern'},
    'hybrid with the old name': {'load': 'hybrid with the old name'},
}


def test_hybrid_run(checkpoints, tmp_path):
    refused = {name: dict(settings) for name, (settings, _) in HYBRID_RUN.items()}
    loads = {name: dict(settings) for name, settings in LOADS.items()}
    outcomes, output = attempt(
        refused | loads,
        checkpoints,
        tmp_path,
        'hybrid',
        *RESHARDABLE,
        '--hybrid-layer-pattern=*-*-',
        '--seed=99',
    )
    for name, (_, message) in HYBRID_RUN.items():
        assert outcomes[name]['error'] and re.match(message, outcomes[name]['error']), outcomes[
            name
        ]
        assert '\n' not in outcomes[name]['error'], name
        assert outcomes[name]['untouched'], name
    for name in LOADS:
        assert outcomes[name]['error'] is None, outcomes[name]
        assert not outcomes[name]['untouched'], name
    assert output.count(' is active over megatron-core ') == 1
    # Not told of a load that the arguments forbid; what the keys forbid is found after that.
    announced = output.count('> GPT checkpoint into a hybrid model')
    by_keys = [name for name, (_, message) in HYBRID_RUN.items() if 'CheckpointingE' in message]
    assert announced == len(by_keys) + sum(name.startswith('gpt') for name in LOADS)


# DCP reads the chunks that there are, and says nothing.
@pytest.mark.parametrize('nproc, arguments', [(1, []), (2, ['--ckpt-fully-parallel-load'])])
def test_what_was_not_read_is_an_error(nproc, arguments, checkpoints, tmp_path):
    outcomes, _ = attempt(
        {'complete': {'load': 'gpt'}} | {name: {'load': name} for name in INCOMPLETE},
        checkpoints,
        tmp_path,
        'hybrid',
        *RESHARDABLE,
        '--hybrid-layer-pattern=M*-*-',
        *arguments,
        nproc=nproc,
    )
    assert outcomes.pop('complete') == {'error': None, 'untouched': False}
    for name, outcome in outcomes.items():
        assert outcome['error'] and re.match(
            rf'CheckpointingException: {re.escape(INCOMPLETE[name])} \(from \[1, 0, 0\]\): '
            r'the model needs \d+ elements of it and 0 were read',
            outcome['error'],
        ), outcome


GPT_RUN = {
    'fresh-only layers': (
        {'load': 'hybrid with mamba'},
        r"RuntimeError: .*'M\*-M\*-'.*layer 0, 'M' \(2 such layers\)",
    ),
    'unequal counts': (
        {'load': 'hybrid of unequal counts'},
        r"RuntimeError: .*'\*-\*'.*2 attention and 1 MLP",
    ),
    'other number of layers': (
        {'load': 'hybrid of 3 pairs'},
        'RuntimeError: .*of 3 layers.*run has 2.*pass --num-layers 3',
    ),
    'run with a pattern': (
        {'load': 'hybrid', 'hybrid_layer_pattern': '*-*-'},
        'RuntimeError: .*no --hybrid-layer-pattern',
    ),
}
# name of the attempt -> (arguments that differ, what the message has to say)
GPT_RUN_WITH_OTHER_WAYS_OUT = {
    'legacy': (
        {'load': 'legacy hybrid', 'no_load_optim': True},
        r'RuntimeError: \S+/legacy \w+/iter_0000001: legacy torch checkpoints.*' + LEGACY_WAY_OUT,
    ),
    'legacy, finetune': (
        {'load': 'legacy hybrid', 'ckpt_format': 'torch', 'finetune': True},
        r'RuntimeError: \S+/legacy \w+/iter_0000001: legacy torch checkpoints.*' + LEGACY_WAY_OUT,
    ),
    'state in buckets': (
        {'load': 'hybrid in buckets'},
        "RuntimeError: .*'dp_reshardable'.*convert_ckpt_optimizer.py --load-dir .*--no-load-optim",
    ),
    'run without distributed optimizer': (
        {'load': 'hybrid', 'use_distributed_optimizer': False},
        'RuntimeError: .*--use-distributed-optimizer',
    ),
    'no optimizer': (
        {'load': 'hybrid without optimizer'},
        'RuntimeError: .*no optimizer state.*--no-load-optim',
    ),
    'untied': (
        {'load': 'hybrid untied'},
        'CheckpointingException: output_layer.weight: .*--untie-embeddings',
    ),
}
GPT_RUN_LOADS = {
    'gpt': {'load': 'gpt'},
    'hybrid in buckets, weights only': {'load': 'hybrid in buckets', 'no_load_optim': True},
    'hybrid without optimizer, weights only': {
        'load': 'hybrid without optimizer',
        'no_load_optim': True,
    },
    'hybrid': {'load': 'hybrid'},
    'hybrid, finetune': {'load': 'hybrid', 'finetune': True},
    'hybrid without optimizer, finetune': {'load': 'hybrid without optimizer', 'finetune': True},
    'hybrid, a run distributed by layers': {'load': 'hybrid', **BY_LAYERS},
    'hybrid release': {'load': 'hybrid release'},
    'hybrid release without optimizer': {'load': 'hybrid release without optimizer'},
    'hybrid in another order': {'load': 'hybrid in another order'},
    'hybrid without a pattern': {'load': 'hybrid without a pattern'},
    'hybrid with the old name': {'load': 'hybrid with the old name'},
}


def test_gpt_run(checkpoints, tmp_path):
    refused = GPT_RUN | GPT_RUN_WITH_OTHER_WAYS_OUT | HYBRID_CONTRADICTIONS
    outcomes, output = attempt(
        {name: dict(settings) for name, (settings, _) in refused.items()}
        | {name: dict(settings) for name, settings in GPT_RUN_LOADS.items()},
        checkpoints,
        tmp_path,
        'gpt',
        *RESHARDABLE,
        '--seed=99',
    )
    for name, (_, message) in refused.items():
        error = outcomes[name]['error']
        assert error and re.match(message, error), outcomes[name]
        assert '\n' not in error, name
        assert ('pretrain_hybrid.py' in error) == (name in GPT_RUN), name
        assert outcomes[name]['untouched'], name
    for name in GPT_RUN_LOADS:
        assert outcomes[name]['error'] is None, outcomes[name]
        assert not outcomes[name]['untouched'], name
    assert output.count("WARNING: the hybrid model computes its layers in the order '**--'") == 1


@pytest.mark.parametrize(
    'given, checkpoint, pattern',
    [
        (['--num-layers=2'], 'hybrid', None),
        (['--num-layers=2'], 'gpt', None),
        ([], 'gpt', None),
        ([], 'hybrid', '*-*-'),
        (['--num-layers=4'], 'hybrid', '*-*-'),
        (['--num-layers=2', '--hybrid-layer-pattern=**--'], 'hybrid', '**--'),
        (['--hybrid-layer-pattern=*-*-'], 'gpt', '*-*-'),
        ([], 'hybrid with mamba', 'M*-M*-'),
        (['--num-layers=2'], 'hybrid with mamba', 'M*-M*-'),
    ],
)
def test_arguments_from_the_checkpoint(given, checkpoint, pattern, checkpoints, monkeypatch):
    from megatron.training.arguments import parse_args
    from megatron.training.checkpointing import load_args_from_checkpoint

    load = f'--load={checkpoints / checkpoint}'
    own = ['--spec', 'own', 'spec', '--moe-layer-freq=[0,1]']
    monkeypatch.setattr('sys.argv', ['run', '--ckpt-format=torch_dist', load, *own, *given])
    args = parse_args()
    load_args_from_checkpoint(args)
    assert args.hybrid_layer_pattern == pattern
    assert args.hidden_size == 32
    if checkpoint == 'gpt' and pattern:
        assert (args.spec, args.moe_layer_freq) == (['own', 'spec'], [0, 1])
    if pattern is None:
        assert args.num_layers == 2
        assert checkpoint == 'gpt' or (args.spec, args.moe_layer_freq) == (['own', 'spec'], [0, 1])
