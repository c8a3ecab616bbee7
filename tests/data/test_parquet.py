"""Parquet files give the same documents and prompts as the same records in jsonl."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxptd.data import ByteTokenizer
from jaxptd.data.corpora import read_answers, read_documents, tokenize
from jaxptd.errors import UserError

RECORDS = [{"question": f"q{i}", "text": "é" * (i % 3), "other": i} for i in range(2500)]


def written(path: Path, columns: dict) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=700)
    return path


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    columns = {name: [record[name] for record in RECORDS] for name in RECORDS[0]}
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return written(tmp_path / "a.parquet", columns), lines


def test_documents_are_those_of_the_same_jsonl(both: tuple[Path, Path]) -> None:
    found, want = (list(read_documents(path)) for path in both)
    assert found == want
    assert len(found) == 1666  # rows without text are skipped
    tokens = [[each.tolist() for each in tokenize([path], ByteTokenizer())] for path in both]
    assert tokens[0] == tokens[1]


def test_prompts_are_those_of_the_same_jsonl(both: tuple[Path, Path]) -> None:
    found, want = (list(read_answers(path, ["question", "text"])) for path in both)
    assert found == want


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"other": ["a"]}, r'a\.parquet has no column "text"; it needs columns of strings, "text"'),
        ({"text": [1]}, r'a\.parquet row 1 has no string "text"; it'),
        ({"text": ["a", None]}, r'a\.parquet row 2 has no string "text"'),
        ({"text": [""]}, r"a\.parquet holds no text; leave it out"),
    ],
    ids=str,
)
def test_a_file_without_texts_is_an_error(tmp_path: Path, columns: dict, line: str) -> None:
    path = written(tmp_path / "a.parquet", columns)
    with pytest.raises(UserError, match=line):
        list(read_documents(path))


def test_a_file_that_is_cut_off_is_an_error(both: tuple[Path, Path], tmp_path: Path) -> None:
    whole = both[0].read_bytes()
    cut = tmp_path / "cut.parquet"
    for content in (whole[:-7], whole[:4] + bytes(60) + whole[64:]):
        cut.write_bytes(content)
        with pytest.raises(UserError, match=r"cut\.parquet is damaged: ") as error:
            list(read_answers(cut, ["question", "text"]))
        assert "\n" not in str(error.value)


def test_without_pyarrow_the_remedy_is_named(both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"install pyarrow to read it .*pip install -e '\.\[parq"):
        list(read_documents(both[0]))
