"""Every command in README and docs does what it says on small real checkpoints.

Launches that need a cluster or a training set go through the real parsers instead. A command that
nothing here knows how to run fails the test.
"""

import argparse
import importlib
import shlex
import subprocess
import sys
import tomllib

import pytest

from tests.cpu_megatron.torchrun import torchrun
from tests.unit_tests.tools.checkpoint.documented_commands import (
    REPOSITORY,
    documented_commands,
    filled_in,
)
from tools.checkpoint import convert_ckpt_pp_vpp
from tools.checkpoint.convert_ckpt_optimizer import convert_optimizer

COMMANDS = documented_commands()
# Commands that other tests run, by the words they begin with.
RUN_ELSEWHERE = {
    'pip install': 'tests/unit_tests/overlay/test_overlay.py',
    'torchrun --standalone -m tests.cpu_megatron.pretrain': (
        'tests/unit_tests/cpu_megatron/test_training.py'
    ),
    'python -S': 'tests/unit_tests/overlay/test_overlay.py',
    'python -m tests.unit_tests.overlay.needs': 'tests/unit_tests/overlay/test_guard.py',
    'python -m tests.upstream.guard': 'tests/unit_tests/overlay/test_guard.py',
    'pip uninstall': 'tests/unit_tests/overlay/test_overlay.py',
    'python -m tests.unit_tests.optimizer.facts': 'tests/unit_tests/optimizer/test_facts.py',
    'torchrun --nproc-per-node 2 -m tests.unit_tests.optimizer.facts': (
        'tests/unit_tests/optimizer/test_facts.py'
    ),
    'python -m pytest tests/unit_tests/tools/checkpoint/test_damaged_checkpoints.py': (
        'tests/unit_tests/tools/checkpoint/test_damaged_checkpoints.py'
    ),
}
# What `python -m` of a module hands its arguments to.
COMMAND_OF = {
    'distrib_optimizer': 'tools.checkpoint.resume_report',
    'gpt_checkpoint_interop': 'tools.checkpoint.gpt_into_hybrid',
}
# Those that take minutes or change a document: their options are looked up.
LOOKED_UP = ('benchmarks/', 'docs/')


@pytest.fixture(scope='module')
def places(vpp, tmp_path_factory):
    """What stands for the paths of the documents, outputs apart."""
    root = tmp_path_factory.mktemp('documents')
    train('gpt', root / 'gpt', '--train-iters 12 --save-interval 4 --num-layers 4')
    train('hybrid', root / 'hybrid', '--train-iters 3 --hybrid-layer-pattern *-*-')
    train('gpt', root / 'buckets', '--train-iters 3', options=())
    convert_optimizer(root / 'gpt', root / 'fsdp', to='fsdp_dtensor')
    stages, edge, cloud = root / 'stages', root / 'edge', root / 'cloud'
    for words in (
        f'reshape --load-dir {vpp} --save-dir {stages} --pipeline-size 4 --virtual-size 1',
        f'merge --load-dir {stages} --save-dir-edge {edge} --save-dir-cloud {cloud} '
        '--merge-stages 0,3 --merge-cloud-stages 1,2',
    ):
        assert convert_ckpt_pp_vpp.main(words.split()) == 0
    runs = (
        'checkpoints',
        '/ckpt/gpt',
        '/ckpt/run',
        'ROOT',
        'runs/a',
        'PATH',
        'CHECKPOINT',
        'A',
        'B',
    )
    return {run: root / 'gpt' for run in runs} | {
        '/ckpt/hybrid': root / 'hybrid',
        'checkpoints-buckets': root / 'buckets',
        'checkpoints-stages': stages,
        '/ckpt/buckets': root / 'buckets',
        '/ckpt/fsdp': root / 'fsdp',
        'D': stages,
        'TP1': stages,
        'TP8': stages,
        'chunks': vpp,
        'E': edge,
        'C': cloud,
    }


def train(kind, directory, arguments, options=('--dist-ckpt-optim-fully-reshardable',)):
    torchrun(
        1,
        'tests.cpu_megatron.pretrain',
        kind,
        *arguments.split(),
        *('--save', str(directory), '--ckpt-format', 'torch_dist'),
        *('--use-distributed-optimizer', *options),
        env={'CPU_MEGATRON_OPTIMIZER': 'fused_adam'},
    )


EXAMPLES = tuple(f'checkpoints-{name}' for name in ('reshardable', 'merged', 'chunks'))
OUTPUTS = ('OUT', 'MERGED', 'merged', '/ckpt/merged', 'DIR', *EXAMPLES)


def test_there_are_commands_of_every_kind():
    found = {command.file for command in COMMANDS}
    assert {'README.md', 'docs/pp_vpp.md', 'docs/weighted_merge.md'} <= found
    assert len(COMMANDS) > 25
    assert {'make', 'pip', 'python', 'torchrun', 'srun', 'pretrain_hybrid.py'} <= {
        command.words[0] for command in COMMANDS
    }


@pytest.mark.parametrize('command', COMMANDS, ids=str)
def test_documented_command(command, places, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    words = command.words
    program = words[0].rpartition('/')[2]
    text = ' '.join([program, *words[1:]])
    elsewhere = [test for start, test in RUN_ELSEWHERE.items() if text.startswith(start)]
    if elsewhere:
        assert (REPOSITORY / elsewhere[0]).exists()
    elif program == 'make':
        subprocess.run(['make', '-n', *words[1:]], check=True, capture_output=True)
    elif program == 'export':
        assert '=' in words[1]
    elif program.startswith('pretrain_'):
        parse_training(program, words[1:], monkeypatch)
    elif program in ('torchrun', 'srun'):
        parse_launch(words, places, tmp_path)
    elif program.startswith('megatron-'):
        run(console_command(program), words[1:], places, tmp_path)
    elif program == 'python' and words[1] == '-c':
        subprocess.run([sys.executable, *words[1:]], check=True)
    elif program == 'python' and words[1].startswith(LOOKED_UP):
        look_up(words[1], words[2:])
    elif program == 'python' and words[1] == '-m':
        run(words[2], words[3:], places, tmp_path)
    elif program == 'python' and words[1].endswith('.py'):
        run(words[1].removesuffix('.py').replace('/', '.'), words[2:], places, tmp_path)
    else:
        pytest.fail(f'nothing runs {command}')
    assert 'Traceback' not in capsys.readouterr().err


def console_command(name):
    scripts = tomllib.loads((REPOSITORY / 'pyproject.toml').read_text())['project']['scripts']
    return f'tools.checkpoint.{scripts[name].partition(":")[2]}'


def run(module, words, places, tmp_path):
    """In this process where the module has a ``main`` that takes arguments."""
    if module == 'examples.make_checkpoints':
        # the fixture trains as it does
        assert importlib.import_module(module).arguments().parse_args(words).directory
        return
    if module == 'megatron_overlay':
        shown = subprocess.run([sys.executable, '-m', module], capture_output=True, text=True)
        assert 'megatron-core' in shown.stdout and not shown.stderr  # 1 where it isn't installed
        return
    places = dict(places) | outputs(tmp_path)
    if words[:1] == ['merge']:  # there E and C are outputs
        places |= {name: tmp_path / name for name in 'EC'}
    arguments = [word.strip('[]') for word in filled_in(words, places)]  # optional ones, too
    if arguments[:1] == ['split'] and '--load-dir' in arguments:
        arguments[arguments.index('--load-dir') + 1] = str(places['chunks'])
    module = COMMAND_OF.get(module.rpartition('.')[2], module)
    assert importlib.import_module(module).main(arguments) == 0


def outputs(tmp_path):
    return {name: tmp_path / name.strip('/') for name in OUTPUTS}


def parse_training(program, words, monkeypatch):
    """Megatron's own parser knows every argument."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    _, unknown = parser.parse_known_args([word for word in words if word != '…'])
    assert unknown == []


def parse_launch(words, places, tmp_path):
    """torchrun's parser and the tool's know every argument."""
    from torch.distributed.run import get_args_parser

    from tools.checkpoint.merge.cli import make_parser

    if words[0] == 'srun':
        inner = shlex.split(words[words.index('-c') + 1].replace('\\', ' '))
        script, rest = next((w, inner[i + 1 :]) for i, w in enumerate(inner) if w.endswith('.py'))
    else:
        launch = get_args_parser().parse_args(words[1:])
        script, rest = launch.training_script, launch.training_script_args
    assert (REPOSITORY / script).exists()
    make_parser().parse_args(filled_in(list(rest), dict(places) | outputs(tmp_path)))


def look_up(script, words):
    source = (REPOSITORY / script).read_text()
    for word in words:
        if word.startswith('-'):
            assert f"'{word}'" in source, f'{script} has no {word}'
