"""Outputs that exist, lie in each other or in a source, or can't be made."""

import pytest

from tests.unit_tests.tools.checkpoint.pp_vpp_damage import SIDES, check
from tests.unit_tests.tools.checkpoint.pp_vpp_files import ITERATION, MERGE

ONE_STAGE = {
    'output exists': (
        lambda root: (root.parent / 'OUT' / ITERATION).mkdir(parents=True),
        MERGE,
        rf'OUT/{ITERATION}: exists, and is replaced with --overwrite only; pass it, or name',
    ),
    'file in the place of the output, to be replaced': (
        lambda root: ((root.parent / 'OUT').mkdir(), (root.parent / 'OUT' / ITERATION).touch()),
        f'{MERGE} --overwrite --dry-run',
        f'OUT/{ITERATION}: no directory, and only a directory is replaced',
    ),
    'output that holds a part of the source by a link, to be replaced': (
        lambda root: (
            (root.parent / 'OUT').mkdir(),
            (root / ITERATION).rename(root.parent / 'OUT' / ITERATION),
            (root / ITERATION).symlink_to(root.parent / 'OUT' / ITERATION),
        ),
        f'{MERGE} --overwrite --dry-run',
        f'OUT/{ITERATION}: holds .*, which is to be converted; name another output',
    ),
    'source is output, to be replaced': (
        None,
        MERGE.replace('OUT', 'SRC') + ' --overwrite',
        'both source and output',
    ),
    'source is output': (None, MERGE.replace('OUT', 'SRC'), 'both source and output'),
    'source is output by another name': (
        lambda root: (root.parent / 'LINK').symlink_to(root),
        MERGE.replace('OUT', 'LINK'),
        'both source and output',
    ),
    'output inside the source': (
        None,
        MERGE.replace('OUT', f'SRC/{ITERATION}/new'),
        'lies inside the source',
    ),
    'one output for both sides': (
        None,
        f'{SIDES} --merge-stages 0,3 --merge-cloud-stages 1,2'.replace('OUT2', 'OUT'),
        'both --save-dir-edge and --save-dir-cloud',
    ),
    'cloud output in the iteration of the edge output': (
        None,
        f'{SIDES}/{ITERATION} --merge-stages 0,3 --merge-cloud-stages 1,2'.replace('OUT2', 'OUT'),
        f'OUT/{ITERATION}: lies inside the other output',
    ),
    'edge output in the iteration of the cloud output': (
        None,
        'merge --load-dir SRC --save-dir-edge OUT/iter_0000002 --save-dir-cloud OUT '
        '--merge-stages 0,3 --merge-cloud-stages 1,2',
        f'OUT/{ITERATION}: lies inside the other output',
    ),
    'output in a loop of links': (
        lambda root: (root.parent / 'LINK').symlink_to('LINK'),
        MERGE.replace('OUT', 'LINK/z'),
        "LINK/z: can't be used: .*loop",
    ),
    'output with a name that is too long': (
        None,
        MERGE.replace('OUT', f'OUT{"x" * 300}') + ' --dry-run',
        "x: can't be used: File name too long",
    ),
    'output with a name that is too long below a missing directory': (
        None,
        MERGE.replace('OUT', f'OUT/{"x" * 300}/y') + ' --dry-run',
        r"x/y: can't be written: File name too long \(300 bytes, at most 255\)",
    ),
    'directory in the place of the tracker': (
        lambda root: (root.parent / 'OUT/latest_checkpointed_iteration.txt').mkdir(parents=True),
        MERGE,
        r'OUT/latest_checkpointed_iteration\.txt: a directory, expected a file',
    ),
    'output that is a file': (
        lambda root: (root.parent / 'OUT').touch(),
        MERGE + ' --dry-run',
        "OUT: can't be written: .*OUT is no directory",
    ),
}


@pytest.mark.parametrize('name', ONE_STAGE)
def test_refused(name, pp4, tmp_path, capsys):
    check(ONE_STAGE[name], pp4, tmp_path, capsys)
