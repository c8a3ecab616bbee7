"""Files whose content does not match their name are reported, with the remedy."""

import gzip
import io
import json

import numpy as np
import pytest

from jaxptd import DataConfig
from jaxptd.data import ByteTokenizer, open_data
from jaxptd.data.token_files import open_token_file
from jaxptd.errors import UserError

LINE = json.dumps({"text": "a text of some words " * 9}).encode() + b"\n"
GZ = gzip.compress(LINE, mtime=0)  # keeps the time out of test ids
RARE = np.where(np.arange(4000) % 9, 3, 300)  # one id in nine is above 31


def read(path, data):
    path.write_bytes(data)
    config = DataConfig(source=str(path), validation_fraction=0.0)
    return open_data(config, ByteTokenizer(), seq_length=8, vocab_size=2**16, seed=0).train.tokens


def array_bytes():
    file = io.BytesIO()
    np.save(file, RARE.astype(np.uint16))
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "line"),
    [
        ("a.jsonl", GZ, "is compressed by gzip; end its name in .gz, or decompress it"),
        ("a.bin", GZ, "is compressed by gzip; end its name in .gz, or decompress it"),
        (
            "a.jsonl.gz",
            gzip.compress(GZ, mtime=0),
            "is compressed by gzip, once decompressed; name the fi",
        ),
        ("a.txt", b"PAR1" + bytes(99), "is parquet; end its name in .parquet"),
        ("a.bin", array_bytes(), "is a numpy array; write its ids with tofile, as uint16 or uint"),
        ("a.npy", array_bytes(), "is a numpy array; write its ids with tofile, as uint16 or uint"),
        (
            "a.bin",
            b"PK\x03\x04" + bytes(200),
            "is a zip archive, as are .npz, .pt and .docx; unpack it",
        ),
        ("a.bin", LINE, "is text, but its name says token ids; rename it to .txt"),
        ("a.txt", "a text".encode("utf-16"), "is text in UTF-16 or UTF-32; convert it to UTF-8"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, not "),
        (
            "a.bin",
            (np.arange(4000) * 7 % 3001).astype(">u2").tobytes(),
            "has no header, and its ids look big-endian (upper byte ",
        ),
        (
            "a.bin",
            RARE.astype("<i8").tobytes(),
            "has no header and its ids look like 64 bits (every second 32-b",
        ),
    ],
)
def test_what_a_file_is_by_its_first_bytes(tmp_path, name, data, line):
    with pytest.raises(UserError) as error:
        read(tmp_path / name, data)
    assert str(error.value).startswith(f"data.source: {tmp_path / name} {line}")


def test_ids_of_32_bits_most_of_which_are_small(tmp_path):
    (tmp_path / "a.bin").write_bytes(RARE.astype("<u4").tobytes())
    np.testing.assert_array_equal(open_token_file(tmp_path / "a.bin"), RARE)
    (tmp_path / "b.bin").write_bytes(RARE.astype("<u2").tobytes())
    np.testing.assert_array_equal(open_token_file(tmp_path / "b.bin"), RARE)


def test_frames_of_zstd_and_one_that_was_cut(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    lines = LINE * 2000
    whole = zstandard.ZstdCompressor().compress(lines)
    twice = read(tmp_path / "a.jsonl.zst", whole + whole)
    assert len(twice) == 4000 * (len(json.loads(LINE)["text"]) + 1)
    for kept in (whole[:-3], whole + whole[: len(whole) // 2]):
        with pytest.raises(UserError, match="is damaged: the compressed file ends before its last"):
            read(tmp_path / "a.jsonl.zst", kept)


@pytest.mark.parametrize(
    ("name", "data", "line"),
    [
        (
            "a.csv",
            "id;text\n1;b\n",
            "separates columns by ';', but its name says",
        ),
        ("a.csv", "id\ttext\n1\tb\n", r"separates columns by '\t', but its name says ','"),
        (
            "a.jsonl",
            '{"text": null}',
            'line 1 has no string "text", but null; each line must be an object with',
        ),
        (
            "a.jsonl",
            '{"text": [1]}',
            'line 1 has no string "text", but an array; each line must be an object with',
        ),
        (
            "a.json",
            '{"data": [{"text": "b"}]}',
            'line 1 has no string "text"; each line must be an object with "text"; it has no text, '
            "only data",
        ),
    ],
)
def test_records_that_have_no_text_where_it_is_sought(tmp_path, name, data, line):
    with pytest.raises(UserError) as error:
        read(tmp_path / name, data.encode())
    assert str(error.value).startswith(f"data.source: {tmp_path / name} {line}")
