"""Small text files named by the user: anything else is refused in one line."""

import os
from pathlib import Path

import pytest

from jaxptd.errors import LARGEST, UserError, read_small


def test_a_text_is_read_without_its_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("\ufeffgrün".encode())
    assert read_small(path, remedy="") == "grün"
    path.write_bytes(b"x" * LARGEST)
    assert len(read_small(path, remedy="")) == LARGEST


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none", "No such file or directory"),
        (".", "is not a file on disk"),
        ("pipe", "is not a file on disk"),  # reading it would block forever
        ("large", f"has more than {LARGEST} bytes"),
        ("binary", "is not text"),
        ("a\0b", "null byte"),
    ],
)
def test_what_is_no_small_text_is_refused(tmp_path: Path, name: str, words: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * (LARGEST + 1))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError) as error:
        read_small(tmp_path / name, what="a table", remedy="name a table")
    line = str(error.value)
    assert line.startswith("a table ") and words in line and line.endswith("; name a table")
    assert "\n" not in line and "\0" not in line
