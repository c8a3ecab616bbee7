"""Token files: round trips, lazy reading, errors for broken files."""

import errno
import os
import struct

import numpy as np
import pytest
from limited import largest_file

from jaxptd.data import token_files
from jaxptd.data.batches import Concatenated, locate
from jaxptd.data.token_files import (
    Layout,
    is_token_file,
    layout_of,
    open_token_file,
    open_tokens,
    write_bin,
    write_bin_arrays,
)
from jaxptd.errors import UserError

SIZES = {"vocab_size": 257, "end_of_document": 256}
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float32": 7, "uint16": 8}


def write_megatron(
    prefix, sequences, *, dtype="uint16", magic=b"MMIDIDX\0\0", version=1, pointers=None
):
    """Writes the files of Megatron-LM's IndexedDatasetBuilder, one sequence per document."""
    arrays = [np.array(ids, dtype=dtype) for ids in sequences]
    lengths = np.array([len(array) for array in arrays], np.int32)
    if pointers is None:
        pointers = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    documents = np.arange(len(arrays) + 1, dtype=np.int64)
    header = magic + struct.pack("<QBQQ", version, CODES[dtype], len(arrays), len(documents))
    index = (
        header + lengths.tobytes() + np.array(pointers, np.int64).tobytes() + documents.tobytes()
    )
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    return prefix.with_suffix(".bin")


def test_nanogpt_round_trip(tmp_path):
    write_bin(tmp_path / "a.bin", np.array([0, 258, 65535], dtype=np.int64))
    tokens = open_token_file(tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == b"\x00\x00\x02\x01\xff\xff"
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [0, 258, 65535]


def test_writing_arrays_counts_their_ids(tmp_path):
    arrays = (np.array(ids, np.uint16) for ids in ([1, 2], [], [3]))
    assert write_bin_arrays(tmp_path / "a.bin", arrays, **SIZES) == 3
    assert open_token_file(tmp_path / "a.bin").tolist() == [1, 2, 3]


def test_an_interrupted_write_leaves_what_was_there(tmp_path):
    def arrays():
        yield np.array([1, 2])
        raise KeyboardInterrupt

    write_bin(tmp_path / "a.bin", np.array([7]))
    with pytest.raises(KeyboardInterrupt):
        write_bin_arrays(tmp_path / "a.bin", arrays(), **SIZES)
    assert open_token_file(tmp_path / "a.bin").tolist() == [7]
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("wrong", [-1, 65536])
def test_an_id_beyond_uint16_is_an_error(tmp_path, wrong):
    with pytest.raises(UserError, match=rf"id {wrong} does not fit 16 bits \(0 to 65535\)"):
        write_bin(tmp_path / "a.bin", np.array([70, wrong, 3]))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["x" * 300 + ".bin", "a\0b.bin", "\ud800.bin"])
def test_a_name_that_no_file_can_have_is_one_line(tmp_path, name):
    with pytest.raises(UserError, match="cannot write .*; use a short name, in a") as caught:
        write_bin(tmp_path / name, np.arange(3))
    assert str(caught.value).isprintable()
    assert os.listdir(tmp_path) == []


def test_a_name_that_is_as_long_as_can_be_is_written(tmp_path):
    name = "x" * 251 + ".bin"
    write_bin(tmp_path / name, np.arange(3))
    assert os.listdir(tmp_path) == [name]
    np.testing.assert_array_equal(np.fromfile(tmp_path / name, np.uint16), np.arange(3))


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_is_one_line(tmp_path, monkeypatch, call, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(UserError, match=f"{os.strerror(number)}; use a short name, in a writable"):
        write_bin(tmp_path / "a.bin", np.arange(3))
    assert os.listdir(tmp_path) == []


def test_a_disk_that_becomes_full_is_one_line_and_leaves_what_was_there(tmp_path):
    write_bin(tmp_path / "a.bin", np.array([7]))
    arrays = (np.arange(1000) for _ in range(1000))
    with (
        largest_file(100_000),
        pytest.raises(UserError, match=r"cannot write .*a\.bin: File too large; use a short name"),
    ):
        write_bin_arrays(tmp_path / "a.bin", arrays, **SIZES)
    assert open_token_file(tmp_path / "a.bin").tolist() == [7]
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_an_index_that_is_no_file_is_an_error(tmp_path, make):
    write_bin(tmp_path / "a.bin", np.arange(3))
    make(tmp_path / "a.idx")
    with pytest.raises(UserError, match=r"a\.idx is not a regular file; remove it"):
        open_token_file(tmp_path / "a.bin")


def test_nothing_to_write_and_nowhere_to_write_are_errors(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="no tokens to write"):
        write_bin(tmp_path / "a.bin", np.array([], np.uint16))
    for folder in ("missing", "file"):
        with pytest.raises(UserError, match=rf"there is no folder .*{folder}; make it first"):
            write_bin(tmp_path / folder / "a.bin", np.array([1]))
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_files.os, "fsync", fail)
    with pytest.raises(UserError, match=r"cannot write .*a\.bin: No space left on device"):
        write_bin(tmp_path / "a.bin", np.array([1]))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_megatron_is_read_in_its_dtype(tmp_path, dtype):
    tokens = open_token_file(write_megatron(tmp_path / "m", [[1, 2, 3], [], [100]], dtype=dtype))
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == dtype
    assert tokens.tolist() == [1, 2, 3, 100]


def test_a_mapped_file_is_not_read(tmp_path):
    """Maps a sparse file larger than the machine's memory."""
    path = tmp_path / "a.bin"
    path.touch()
    os.truncate(path, 2**40)
    tokens = open_tokens([path])
    assert isinstance(tokens, np.memmap)
    assert isinstance(tokens[10:], np.memmap)
    assert len(tokens) >= 2**32
    assert tokens[-3:].tolist() == [0, 0, 0]


def test_only_bin_files_are_token_files(tmp_path):
    assert is_token_file(tmp_path / "a.bin")
    assert not is_token_file(tmp_path / "bin.txt")


@pytest.mark.parametrize(
    ("size", "message"), [(0, "is empty"), (3, "has 3 bytes, not a multiple of 2")]
)
def test_nanogpt_of_a_wrong_size_is_an_error(tmp_path, size, message):
    (tmp_path / "a.bin").write_bytes(bytes(size))
    with pytest.raises(UserError, match=rf"a\.bin {message}"):
        open_token_file(tmp_path / "a.bin")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*a\.bin: No such file"):
        open_token_file(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": b"TNTIDX\0\0\0"}, "is not a Megatron index"),
        ({"version": 2}, "has version 2, not 1"),
        ({"dtype": "float32"}, "has dtype code 7; ids must have one of 1 uint8, "),
        ({"pointers": [0, 6]}, "are not contiguous"),
        ({"pointers": [4, 0]}, "are not contiguous"),
    ],
)
def test_a_broken_megatron_index_is_an_error(tmp_path, change, message):
    path = write_megatron(tmp_path / "m", [[1, 2], [3]], **change)
    with pytest.raises(UserError, match=rf"m\.idx.* {message}"):
        open_token_file(path)


@pytest.mark.parametrize("keep", [0, 5, 33])
def test_a_megatron_index_truncated_in_its_header_is_an_error(tmp_path, keep):
    path = write_megatron(tmp_path / "m", [[1, 2]])
    os.truncate(tmp_path / "m.idx", keep)
    with pytest.raises(UserError, match=r"m\.idx is not a Megatron index"):
        open_token_file(path)


@pytest.mark.parametrize("change", [-1, 1])
def test_megatron_files_of_a_wrong_size_are_errors(tmp_path, change):
    path = write_megatron(tmp_path / "m", [[1, 2], [3]])
    index = tmp_path / "m.idx"
    whole = index.read_bytes()
    os.truncate(index, len(whole) + change)
    with pytest.raises(UserError, match=rf"m\.idx has {len(whole) + change} bytes, 2 sequences"):
        open_token_file(path)
    index.write_bytes(whole)
    os.truncate(path, 6 + change)
    with pytest.raises(UserError, match=rf"m\.bin has {6 + change} bytes, .*m\.idx says 6"):
        open_token_file(path)


def test_an_empty_megatron_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"m\.bin is empty"):
        open_token_file(write_megatron(tmp_path / "m", []))


def test_several_files_are_concatenated_without_reading(tmp_path):
    write_bin(tmp_path / "a.bin", np.arange(10))
    write_megatron(tmp_path / "m", [range(10, 30)], dtype="int32")
    joined = open_tokens([tmp_path / "a.bin", tmp_path / "m.bin"])
    assert isinstance(joined, Concatenated)
    assert len(joined) == 30
    assert all(isinstance(array, np.memmap) for array in joined[5:25].arrays)
    assert np.asarray(joined[5:25]).tolist() == list(range(5, 25))


def test_slices_of_concatenated_arrays_are_those_of_one_array():
    whole = np.arange(7)
    joined = Concatenated((whole[:3], whole[3:3], whole[3:5], whole[5:]))
    for start in (None, *range(-8, 9)):
        for stop in (None, *range(-8, 9)):
            assert np.asarray(joined[start:stop]).tolist() == whole[start:stop].tolist()
    with pytest.raises(IndexError, match="step 1"):
        joined[::2]


def test_a_token_is_located_in_its_file(tmp_path):
    write_bin(tmp_path / "a.bin", np.arange(10))
    write_bin(tmp_path / "b.bin", np.arange(10))
    alone = open_tokens([tmp_path / "a.bin"])
    joined = open_tokens([tmp_path / "a.bin", tmp_path / "b.bin"])
    assert locate(alone, 3) == f"token 3 of {tmp_path / 'a.bin'}"
    assert locate(alone[4:][1:], 3) == f"token 8 of {tmp_path / 'a.bin'}"
    assert locate(joined[7:], 3) == f"token 0 of {tmp_path / 'b.bin'}"
    assert locate(joined[12:], 3) == f"token 5 of {tmp_path / 'b.bin'}"
    assert locate(np.arange(9), 3) == "token 3 of the data"
    with pytest.raises(IndexError):
        locate(joined, 20)


# --- Headers, and widths without one


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "<u2"), (2**16 + 1, "<u4")])
def test_a_file_of_ours_says_what_it_holds(tmp_path, vocab_size, dtype):
    ids = np.array([0, 5, vocab_size - 1])
    sizes = {"vocab_size": vocab_size, "end_of_document": 5}
    assert write_bin_arrays(tmp_path / "a.bin", [ids], **sizes) == 3
    assert (tmp_path / "a.bin").stat().st_size == 64 + 3 * np.dtype(dtype).itemsize
    assert layout_of(tmp_path / "a.bin") == Layout(np.dtype(dtype), 64, 3, vocab_size, 5)
    tokens = open_token_file(tmp_path / "a.bin")
    assert tokens.tolist() == ids.tolist()
    assert locate(tokens[1:], 1) == f"token 2 of {tmp_path / 'a.bin'}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-2], "has 4 bytes of ids, but its header says 6; it is truncated"),
        (lambda data: data[:40], "ends within its header; make it again"),
        (lambda data: data[:64], "is empty"),
        (
            lambda data: data[:8] + b"\2" + data[9:],
            "has version 2 with ids of 2 bytes, this jaxptd",
        ),
        (lambda data: data[:12] + b"\3" + data[13:], "has version 1 with ids of 3 bytes"),
    ],
)
def test_a_damaged_file_of_ours_is_an_error(tmp_path, change, message):
    write_bin_arrays(tmp_path / "a.bin", [np.arange(3)], **SIZES)
    data = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(change(data))
    with pytest.raises(UserError, match=message):
        open_token_file(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")]
)
def test_files_of_llm_c_are_read(tmp_path, magic, version, dtype):
    header, ids = np.zeros(256, "<i4"), np.arange(300).astype(dtype)
    header[:3] = magic, version, len(ids)
    path = tmp_path / "a.bin"
    path.write_bytes(header.tobytes() + ids.tobytes())
    assert open_token_file(path).tolist() == list(range(300))
    path.write_bytes(header.tobytes() + ids.tobytes()[:-4])
    with pytest.raises(UserError, match="its header says"):
        open_token_file(path)
    header[1] = 3
    path.write_bytes(header.tobytes() + ids.tobytes())
    with pytest.raises(UserError, match="has llm.c's version 3"):
        open_token_file(path)


def drawn(dtype, low, high, count=400):
    return np.random.default_rng(0).integers(low, high, count).astype(dtype)


@pytest.mark.parametrize(
    "ids",
    [
        drawn("<u4", 0, 128_256),  # Llama 3's
        drawn("<i4", 0, 50_257),  # Megatron's, without its .idx
        drawn("<u4", 32, 127),  # bytes of text
        np.tile(np.array([100_000, 256], "<u4"), 200),
    ],
    ids=str,
)
def test_ids_of_32_bits_without_a_header_are_read_as_such(tmp_path, ids):
    (tmp_path / "a.bin").write_bytes(ids.tobytes())
    assert layout_of(tmp_path / "a.bin").guessed
    assert open_token_file(tmp_path / "a.bin").tolist() == ids.tolist()


@pytest.mark.parametrize(
    "ids",
    [
        drawn("<u2", 0, 50_257),
        drawn("<u2", 0, 4),  # four ids
        drawn("<u2", 32, 127),  # bytes of text
        drawn("<u2", 0, 40),
        np.zeros(400, "<u2"),
        np.full(400, 99, "<u2"),
        np.tile(np.array([5, 300], "<u2"), 200),
        np.repeat(np.array([1, 3, 200], "<u2"), 120),
        np.array([70, 0, 80, 1], "<u2"),  # too few to tell
    ],
    ids=str,
)
def test_ids_of_16_bits_are_never_taken_for_others(tmp_path, ids):
    (tmp_path / "a.bin").write_bytes(ids.tobytes())
    assert not layout_of(tmp_path / "a.bin").guessed
    assert open_token_file(tmp_path / "a.bin").tolist() == ids.tolist()


def test_ids_of_64_bits_without_a_header_are_an_error(tmp_path):
    (tmp_path / "a.bin").write_bytes(drawn("<i8", 0, 50_257).tobytes())
    with pytest.raises(UserError, match="has no header and its ids look like 64 bits"):
        open_token_file(tmp_path / "a.bin")
