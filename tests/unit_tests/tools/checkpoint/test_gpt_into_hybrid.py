"""What the dry run of a load tells."""

import pickle
import shutil

from tests.unit_tests.dist_checkpointing.gpt_runs import save_gpt
from tools.checkpoint.gpt_into_hybrid import main

TRACKER = 'latest_checkpointed_iteration.txt'


def test_the_dry_run_tells_what_a_load_will_do(tmp_path, capsys):
    save_gpt(tmp_path / 'iter_0000002')
    (tmp_path / TRACKER).write_text('2\n')
    assert main([str(tmp_path), 'M*-*-']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split('<-')[1].strip() for line in lines if '<-' in line] == [
        'fresh initialisation',
        'attention of GPT layer 0',
        'dense MLP of GPT layer 0',
        'attention of GPT layer 1',
        'dense MLP of GPT layer 1',
    ]
    assert lines[-2:] == [
        'Optimizer state: fully_reshardable',
        'Will load, with its optimizer state. The checkpoint has no random state; pass '
        '--no-load-rng to start it fresh.',
    ]
    assert not any('order' in line for line in lines)
    assert main([str(tmp_path), '*M*--']) == 0
    assert 'computes its layers in the order' in capsys.readouterr().out
    assert main(['--', str(tmp_path), '-*-*']) == main([str(tmp_path), '-*-*']) == 0
    capsys.readouterr()
    for other in ('iter_0000001', 'release'):
        shutil.copytree(tmp_path / 'iter_0000002', tmp_path / other)
    for path, pattern, reason in [
        (tmp_path, '*-', '2 layers'),
        (tmp_path, '*E*E', 'dense'),
        (tmp_path / 'nowhere', '*-*-', "doesn't exist"),
        (tmp_path / 'iter_0000002', '*-*-', f'random weights; pass --load {tmp_path}.'),
        (tmp_path / 'iter_0000001', '*-*-', f'pass --load {tmp_path} --ckpt-step 1.'),
        (tmp_path / 'release', '*-*-', 'whose tracker names it'),
        (tmp_path / 'iter_0000002/metadata.json', '*-*-', 'is a file'),
        ('x' * 5000, '*-*-', 'File name too long'),
    ]:
        assert main([str(path), pattern]) == 1
        out = capsys.readouterr().out
        assert out.startswith('Will not load: ') and reason in out and out.count('\n') == 1
    assert main([str(tmp_path), '*-*-', '--ckpt-step=1']) == 0
    assert capsys.readouterr().out.startswith(f'{tmp_path}/iter_0000001: GPT')
    assert main([str(tmp_path), '*-*-', '--ckpt-step=3']) == 1
    assert 'iterations in' in capsys.readouterr().out
    (tmp_path / TRACKER).write_text('two')
    assert main([str(tmp_path), '*-*-']) == 1
    assert "holds 'two'" in capsys.readouterr().out
    (tmp_path / TRACKER).write_text('release')
    assert main([str(tmp_path), '*-*-']) == 0
    assert 'the optimizer starts fresh' in capsys.readouterr().out.splitlines()[-1]
    (tmp_path / 'release/metadata.json').unlink()
    assert main([str(tmp_path), '*-*-']) == 1
    assert 'an unfinished checkpoint' in capsys.readouterr().out


def test_the_dry_run_tells_of_a_layer_for_all_depths(tmp_path, capsys):
    save_gpt(tmp_path / 'iter_0000001', mtp_num_layers=1)
    (tmp_path / TRACKER).write_text('1')
    for pattern, depths in (('*-*-/*-', 1), ('*-*-/*-/*-', 2)):
        assert main([str(tmp_path), pattern]) == 0
        out = capsys.readouterr().out
        assert f'{depths} depth(s)  <-  1 MTP layer(s)' in out
        assert ('--mtp-use-repeated-layer' in out) is (depths > 1)


class Hostile:
    def __reduce__(self):
        return print, ('RAN',)


def test_the_dry_run_runs_nothing_from_the_metadata(tmp_path, capsys):
    (tmp_path / TRACKER).write_text('release')
    (tmp_path / 'release').mkdir()
    (tmp_path / 'release/.metadata').write_bytes(pickle.dumps(Hostile()))
    assert main([str(tmp_path), '*-*-']) == 1
    out = capsys.readouterr().out
    assert 'RAN' not in out and 'builtins.print' in out and out.count('\n') == 1
    assert '--trust-checkpoints' not in out  # which this command doesn't have
