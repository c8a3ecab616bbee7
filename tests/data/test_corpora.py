"""Documents and their tokens; a broken file is an error that names it."""

import json

import pytest

from jaxptd.data.corpora import read_documents, tokenize
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.errors import UserError


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
        ("a.jsonl", b'{"text": "a"', r"line 1 is not JSON .*each line is an object"),
        ("a.jsonl", b'[{"text": "a"}]', r'line 1 has no string "text"'),
        ("a.jsonl", b'{"content": "a"}', r'line 1 has no string "text"'),
        ("a.jsonl", b'{"text": 3}', r'line 1 has no string "text"'),
        ("a.jsonl", b'{"text": "\\ud800"}', r"line 1: '\\ud800' is half a surrogate pair"),
        ("a.jsonl", b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "line 1 is not JSON"),
        ("a.jsonl", b"[" * 200_000, "line 1 is not JSON"),
    ],
)
def test_broken_file_is_an_error_that_names_it(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(UserError, match=rf"data\.source: .*{name}.*{message}"):
        list(read_documents(path))


def test_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*gone\.txt: No such file"):
        list(read_documents(tmp_path / "gone.txt"))
