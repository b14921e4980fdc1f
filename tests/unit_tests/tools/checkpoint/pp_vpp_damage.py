"""Changes to copies of rank files, for the tests of what the converter refuses."""

import argparse
import shutil

from tests.unit_tests.tools.checkpoint.pp_vpp_files import ITERATION, load, refused, save

SIDES = 'merge --load-dir SRC --save-dir-edge OUT --save-dir-cloud OUT2'
SPLIT = 'split --load-dir-edge EDGE --load-dir-cloud CLOUD --save-dir OUT'
RESHAPE = 'reshape --load-dir SRC --save-dir OUT'


def edit(change, *ranks):
    """A mutation that changes the loaded state of some rank files."""

    def mutate(root):
        for rank in ranks:
            state = load(root, rank)
            state = change(state) or state
            save(state, root, rank)

    return mutate


def pop(*keys):
    def change(state):
        inner = state
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]

    return change


def put(value, *keys):
    def change(state):
        inner = state
        for key in keys[:-1]:
            inner = inner[key] if not isinstance(inner, argparse.Namespace) else vars(inner)[key]
        if isinstance(inner, argparse.Namespace):
            setattr(inner, keys[-1], value)
        else:
            inner[keys[-1]] = value

    return change


def remove(*names):
    def mutate(root):
        for name in names:
            target = root / ITERATION / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()

    return mutate


def add_file(name, text=''):
    def mutate(root):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    return mutate


def narrow(*names):
    """Half as large in the first dimension, as in another model."""

    def change(state):
        for key, value in state['model'].items():
            if key.endswith(names):
                state['model'][key] = value[: len(value) // 2].clone()

    return change


def exchange(one, other):
    """Rank directories renamed by hand."""

    def mutate(root):
        first, second = (root / ITERATION / f'mp_rank_{rank}' for rank in (one, other))
        first.rename(root / 'aside')
        second.rename(first)
        (root / 'aside').rename(second)

    return mutate


def check(case, source, tmp_path, capsys):
    """A case is what to do to the copy of the source, the command, and a pattern of the message."""
    mutate, command, pattern = case
    shutil.copytree(source, tmp_path / 'SRC')
    if mutate:
        mutate(tmp_path / 'SRC')
        capsys.readouterr()
    refused(command, tmp_path, capsys, pattern)
