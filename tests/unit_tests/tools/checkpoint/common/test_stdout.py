"""What the tools say, on terminals of any kind."""

import io
import sys

from tools.checkpoint.common.progress import progress_bar
from tools.checkpoint.common.stdout import complain, tell


def test_characters_that_the_encoding_lacks(monkeypatch):
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(buffer, encoding='latin-1'))
    assert tell('ü … 模型 \udcff')
    assert buffer.getvalue() == b'\xfc \\u2026 \\u6a21\\u578b \\udcff\n'


def test_an_error_is_one_line(capsys):
    assert complain('a\nb\x1b[31m: ü') == 1
    assert capsys.readouterr() == ('', 'error: a\\nb\\x1b[31m: ü\n')


def test_streams_that_are_closed(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'stdout', None)
    assert not tell('nobody reads this')
    assert capsys.readouterr().err == "error: standard output can't be written: it is closed\n"
    monkeypatch.undo()
    monkeypatch.setattr(sys, 'stderr', None)
    assert complain('nobody reads this') == 1
    with progress_bar(3, 'work') as bar:
        bar.update(3)
    assert capsys.readouterr().out == ''
