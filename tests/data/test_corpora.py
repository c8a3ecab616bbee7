"""Documents and their tokens; a broken file is an error that names it."""

import bz2
import csv
import gzip
import json
import lzma
import sys

import pytest
import zstandard

from jaxptd.data import records
from jaxptd.data.corpora import read_answers, read_documents, tokenize
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.errors import UserError

PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".XZ": lzma.compress}
PACK[".zst"] = zstandard.compress


def write(path, content):
    path.write_bytes(content)
    return path


def test_a_text_file_is_one_document_as_it_is(tmp_path):
    path = write(tmp_path / "a.md", "one\r\n\ntwo é".encode())
    assert list(read_documents(path)) == ["one\r\n\ntwo é"]


def test_a_byte_order_mark_is_dropped(tmp_path):
    assert list(read_documents(write(tmp_path / "a.txt", b"\xef\xbb\xbfa"))) == ["a"]


def test_jsonl_is_a_document_a_line(tmp_path):
    texts = ["one", "two\u2028\nlines \0", "", "é"]
    lines = [json.dumps({"text": text, "id": 1}, ensure_ascii=text == "one") for text in texts]
    path = write(tmp_path / "a.JSONL", "\n\n".join(lines).encode())
    assert list(read_documents(path)) == ["one", "two\u2028\nlines \0", "é"]


def test_jsonl_is_read_line_by_line(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "one"}\nbroken')
    documents = read_documents(path)
    assert next(documents) == "one"
    with pytest.raises(UserError, match="line 2"):
        next(documents)


def test_each_document_is_followed_by_its_end(tmp_path):
    first = write(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "bc"}\n')
    second = write(tmp_path / "b.txt", b"d")
    parts = [part.tolist() for part in tokenize([first, second], ByteTokenizer())]
    assert parts == [[97, 256], [98, 99, 256], [100, 256]]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b'{"text": "a,b", "n": 1}\n{"text": "c"}'),
        ("a.json", b'\xef\xbb\xbf [{"text": "a,b"},\n {"text": ""}, {"text": "c", "n": [2]}]'),
        ("a.ndjson", b'{"text": "a,b"}\n\n{"text": "c"}\n'),
        ("a.csv", b'n,text\r\n1,"a,b"\r\n2,c\r\n3,\r\n'),
        ("a.tsv", b"text\tn\na,b\t1\nc\t2\n"),
    ],
)
@pytest.mark.parametrize("suffix", list(PACK))
def test_records_are_read_as_what_they_are(tmp_path, name, data, suffix):
    path = write(tmp_path / f"{name}{suffix}", PACK[suffix](data))
    assert list(read_documents(path)) == ["a,b", "c"]


def test_a_json_file_of_lines_is_never_whole_in_memory(tmp_path, monkeypatch):
    held = []
    monkeypatch.setattr(records, "_object", lambda data: held.append(len(data)) or json.loads(data))
    path = write(tmp_path / "a.json", b'{"text": "a"}\n' * 1000)
    assert [*read_documents(path)] == ["a"] * 1000
    assert held == [14]


@pytest.mark.parametrize("suffix", list(PACK))
def test_a_json_file_may_be_one_object_over_many_lines(tmp_path, suffix):
    data = b'\xef\xbb\xbf{\n"text": "a\\nb",\n"n": 2\n}\n'
    path = write(tmp_path / f"a.json{suffix}", PACK[suffix](data))
    assert list(read_documents(path)) == ["a\nb"]


def test_a_field_of_a_table_may_be_long(tmp_path):
    limit = csv.field_size_limit()
    path = write(tmp_path / "a.csv", b"text\n" + b"x" * 200_000)
    assert list(read_documents(path)) == ["x" * 200_000]
    assert csv.field_size_limit() == limit


def test_compressed_text_is_text(tmp_path):
    path = write(tmp_path / "a.txt.gz", gzip.compress(b"one\ntwo\n"))
    assert list(read_documents(path)) == ["one\ntwo\n"]
    damaged = write(tmp_path / "b.txt.gz", gzip.compress(b"one\ntwo\n")[:-5])
    with pytest.raises(UserError, match=r"b\.txt\.gz is damaged"):
        list(read_documents(damaged))


def test_without_its_package_zstd_is_an_error(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt.zst", zstandard.compress(b"one"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match="is compressed by zstd; install zstandard to read it"):
        list(read_documents(path))


def test_the_field_of_documents_can_be_named(tmp_path):
    path = write(tmp_path / "a.json", b'[{"instruction": "add", "output": "2"}]')
    assert list(read_documents(path, "output")) == ["2"]
    assert list(read_answers(path, ["instruction", "output"])) == [["add", "2"]]


def test_a_text_that_begins_with_a_brace_is_text(tmp_path):
    for data in (b"{\n  x = 1\n}\n", b'{"a": 1}\nand then\n', b'{"a": 1}'):
        assert list(read_documents(write(tmp_path / "a.txt", data))) == [data.decode()]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"\xef\xbb\xbf", "holds no text"),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b'\n{"text": ""}\n', "holds no text"),
        ("a.txt", b"PK\x03\0", r"is binary, not text \(NUL at byte 3\)"),
        ("a.txt", b"ab\xff", r"not UTF-8 text \(byte 2 is 0xff\)"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xff"}', r"line 3 is not UTF-8 text"),
        ("a.jsonl", b'{"text": "a"}\n\0', r"line 2 is binary"),
        ("a.jsonl", b'{"text": "a"', r"line 1 is not JSON .*each line must be an object"),
        (
            "a.jsonl",
            b'[{"text": "a"}, 3]',
            r'record 2 has no string "text"; it must be an array of',
        ),
        ("a.json", b'{\n"text": "a",}', "line 1 is not JSON .*each line must be an object"),
        (
            "a.json",
            b'{\n"n": 1}',
            'no string "text"; write an object with "text", an array of them',
        ),
        ("a.json", b'{"data": [{"text": "a"}]}', "it has no text, only data"),
        (
            "a.json",
            b'[{"instruction": "a", "output": "b"}]',
            "it has instruction, output: name the",
        ),
        ("a.csv", b"a,b\n1,2\n", r'no column "text"; it has a, b: name the field of documents'),
        ("a.csv", b"text,text\n1,2\n", r'two columns "text"'),
        ("a.csv", b"text,b\n1\n", "line 2 has more or fewer fields than the first line, 2; fix"),
        ("a.csv", b'text\n"a\n', "line 1: unexpected end of data; fix it"),
        ("a.tsv", b"text\tb\na\tb\tc\n", "line 2 has more or fewer fields than the first line, 2"),
        (
            "a.txt",
            b'{"text": "a"}\n{"text": "b"}\n',
            "a JSON object in each line, but its name says",
        ),
        ("a.txt.gz", b"plain", "is damaged: Not a gzipped file"),
        ("a.txt.xz", b"plain", "is damaged: "),
        ("a.txt.bz2", b"plain", "is damaged: Invalid data stream"),
        ("a.txt.zst", b"plain", "is damaged: "),
        ("a.jsonl", b'{"content": "a"}', r'line 1 has no string "text"'),
        ("a.jsonl", b'{"text": 3}', r'line 1 has no string "text"'),
        ("a.jsonl", b'{"text": "\\ud800"}', r"line 1: '\\ud800' is half a surrogate pair"),
        ("a.jsonl", b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "line 1 is not JSON"),
        ("a.jsonl", b"[" * 200_000, "is not JSON .*it must be an array of objects"),
    ],
)
def test_broken_file_is_an_error_that_names_it(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(UserError, match=rf"data\.source: .*{name}.*{message}"):
        list(read_documents(path))


def test_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*gone\.txt: No such file"):
        list(read_documents(tmp_path / "gone.txt"))
