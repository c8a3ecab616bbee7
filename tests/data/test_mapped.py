"""Token files that change while they are mapped."""

import os

import numpy as np
import pytest

from jaxptd.data.batches import WindowsInOrder, whole
from jaxptd.data.token_files import open_tokens, write_bin
from jaxptd.errors import UserError

TOKENS = np.arange(100)


@pytest.fixture
def paths(tmp_path):
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for path in paths:
        write_bin(path, TOKENS)
    return paths


def windows(paths) -> WindowsInOrder:
    return WindowsInOrder(open_tokens(paths)[10:], seq_length=9, vocab_size=100)


def truncate(path):
    os.truncate(path, 20)


def empty(path):
    path.write_bytes(b"")


def write_over(path):
    path.write_bytes(bytes(200))
    os.utime(path, ns=(0, 0))  # a new time, even if written right after it was opened


def append(path):
    with path.open("ab") as file:
        file.write(b"\0\0")


@pytest.mark.parametrize("change", [truncate, empty, write_over, append])
@pytest.mark.parametrize("count", [1, 2])
def test_a_file_that_was_written_to_is_named_before_it_is_read(paths, change, count):
    last = paths[count - 1]
    data = windows(paths[:count])
    number = np.array([data.windows_per_epoch - 1])
    assert data.rows(number).max() > 80
    change(last)
    with pytest.raises(UserError, match=rf"data\.source: {last} was changed while the run read it"):
        data.rows(number)
    if count == 2:
        assert data.rows(np.array([0])).max() == 19  # comes from the other file


def test_a_file_that_was_deleted_or_replaced_can_still_be_read(paths):
    data = windows(paths)
    expected = data.rows(np.arange(20))
    paths[0].unlink()
    write_bin(paths[1], np.zeros(7, np.int64))  # a new file with the same name
    assert np.array_equal(data.rows(np.arange(20)), expected)


def test_a_file_that_the_file_system_has_lost_is_named(paths):
    class Lost:
        def size(self):
            raise OSError(116, "Stale file handle")

    data = windows(paths[:1])
    whole(data.tokens)._mmap = Lost()
    with pytest.raises(UserError, match="was changed while the run read it"):
        data.rows(np.array([0]))
