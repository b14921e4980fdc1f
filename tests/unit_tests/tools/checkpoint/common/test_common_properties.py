"""Paths, trackers, pickles and zip headers of any content, against independent answers."""

import collections
import pickle
import pickletools
import zipfile
from io import BytesIO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit_tests.tools.checkpoint.damage import damaged_bytes, examples
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.common.paths import (
    TRACKER_NAME,
    iteration_dirname,
    list_iterations,
    parse_iteration_dirname,
    read_tracker,
)
from tools.checkpoint.common.pickle_scan import refuse_memory_request
from tools.checkpoint.common.safe_load import load_torch
from tools.checkpoint.common.zip_record import payload_start

NAMES = st.one_of(
    st.from_regex(r'iter_[0-9]{0,12}', fullmatch=True),
    st.from_regex(r'\s?(iter_|Iter_|iter)[-+٣_ 0-9]{0,9}\n?', fullmatch=True),
    st.text(max_size=20),
)


@examples(80)
@given(st.integers(0, 10**12))
def test_an_iteration_survives_its_directory_name(iteration):
    assert parse_iteration_dirname(iteration_dirname(iteration)) == iteration


@examples(100)
@given(NAMES)
def test_a_name_is_an_iteration_only_if_megatron_would_write_it(name):
    written = {f'iter_{i:07d}' for i in _numbers(name)}
    assert (parse_iteration_dirname(name) is not None) == (name in written)


def _numbers(name):
    digits = name.removeprefix('iter_')
    return [int(digits)] if digits.isascii() and digits.isdigit() else []


@examples(100)
@given(
    st.one_of(
        st.binary(max_size=30),
        st.from_regex(rb'[ \r\n]*([0-9]{1,9}|release)[ \r\n]*', fullmatch=True),
        st.integers(4000, 9000).map(lambda n: b'7' * n),
    )
)
def test_a_tracker_is_read_as_its_words_say_or_refused(tmp_path_factory, content):
    root = tmp_path_factory.getbasetemp()
    (root / TRACKER_NAME).write_bytes(content)
    words = content.decode('utf-8', errors='replace').split()
    word = words[0] if len(words) == 1 else ''
    try:
        found = read_tracker(root)
    except CheckpointError as error:
        assert str(error).isprintable()
        assert word != 'release' and not (word.isascii() and word.isdigit() and len(word) <= 100)
    else:
        assert found == (word if word == 'release' else int(word))


@examples(10)
@given(st.sets(st.integers(0, 10**9 - 1), max_size=6), st.lists(st.sampled_from('abc'), max_size=2))
def test_iterations_are_listed_once_and_in_order(tmp_path_factory, iterations, others):
    root = tmp_path_factory.mktemp('root')
    for name in [*map(iteration_dirname, iterations), *set(others)]:
        (root / name).mkdir()
    (root / 'iter_1000000000').write_text('a file')
    assert list(list_iterations(root).items()) == [
        (i, root / iteration_dirname(i)) for i in sorted(iterations)
    ]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.builds(torch.Size, st.lists(st.integers(0, 9), max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=5), inner, max_size=5)
        | st.tuples(inner, inner)
        | st.builds(collections.OrderedDict)
    ),
    max_leaves=40,
)


@examples(60)
@given(VALUES, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_no_pickle_that_python_writes_is_refused(value, protocol):
    refuse_memory_request(pickle.dumps(value, protocol))


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_large_pickles_are_walked_to_their_end(protocol):
    """A memo of more than 256 entries, strings of every width of length, and a request last."""
    value = [str(i) for i in range(400)] + ['x' * 300, b'y' * 70000, 1 << 3000, bytearray(9)]
    data = pickle.dumps(value, protocol)
    refuse_memory_request(data)
    with pytest.raises(pickle.UnpicklingError, match='asks for 1000000'):
        refuse_memory_request(data[:-1] + b'r' + (1_000_000).to_bytes(4, 'little') + b'.')


@examples(100)
@given(st.data(), VALUES, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_requests_are_found_as_the_slow_reader_finds_them(data, value, protocol):
    damaged = data.draw(damaged_bytes(pickle.dumps(value, protocol)))
    asked = 0
    try:
        for operation, argument, _ in pickletools.genops(damaged):
            if operation.name in ('PUT', 'LONG_BINPUT'):
                asked = max(asked, argument)
    except Exception:
        pass  # it ends where the unpickler will, at the latest
    if asked > len(damaged):
        with pytest.raises(pickle.UnpicklingError):
            refuse_memory_request(damaged)


@examples(80)
@given(st.data())
def test_a_damaged_zip_header_never_moves_the_content(data):
    buffer = BytesIO()
    torch.save(torch.arange(4.0), buffer)
    archive = buffer.getvalue()
    record = zipfile.ZipFile(buffer).getinfo('archive/data/0')
    size = 30 + len(record.filename)
    header = archive[record.header_offset :][: size + 100]
    right = payload_start(header, record.filename.encode())
    assert header[right : right + 16] == bytes(torch.arange(4.0).numpy())
    lengths = data.draw(st.binary(min_size=4, max_size=4))
    damaged = header[:26] + lengths + header[30:]
    assert payload_start(damaged, record.filename.encode()) in (None, right)


@examples(30)
@given(st.binary(max_size=400))
def test_any_bytes_are_a_torch_file_or_refused(content):
    try:
        load_torch(BytesIO(content), name='file')
    except CheckpointError as error:
        assert str(error).isprintable()
