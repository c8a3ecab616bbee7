"""Reads the text of parquet files, with pyarrow: the `parquet` extra."""

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxptd.errors import UserError

ROWS = 1024  # in memory at a time
SUFFIX = ".parquet"


def is_parquet(path: Path) -> bool:
    """True for the name of a parquet file."""
    return path.suffix.lower() == SUFFIX


def read_records(path: Path, fields: Sequence[str]) -> Iterator[list[str]]:
    """Yields these columns of each row; the last is the text, without which a row is skipped.

    Raises:
        UserError: pyarrow is not installed, or the file is damaged, or lacks a column of strings.
    """
    needs = f"it needs columns of strings, {' and '.join(map(json.dumps, fields))}"
    file = _opened(path)
    missing = [name for name in fields if name not in file.schema_arrow.names]
    if missing:
        raise UserError(f"data.source: {path} has no column {json.dumps(missing[0])}; {needs}")
    row = 0
    for batch in _batches(file, path, fields):
        for record in batch.select(list(fields)).to_pylist():
            row += 1
            texts = [record[name] for name in fields]
            if wrong := [name for name in fields if not isinstance(record[name], str)]:
                raise UserError(
                    f"data.source: {path} row {row} has no string {json.dumps(wrong[0])}; {needs}"
                )
            if texts[-1]:
                yield texts


def _opened(path: Path) -> Any:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError(
            f"data.source: {path} is parquet; install pyarrow to read it, pip install "
            "'jaxptd[parquet]', or write it as .jsonl"
        ) from error
    try:
        return parquet.ParquetFile(path)
    except ValueError as error:  # pyarrow's errors are ValueErrors or OSErrors
        raise UserError(f"data.source: {path} is damaged: {_line(error)}") from error


def _batches(file: Any, path: Path, fields: Sequence[str]) -> Iterator[Any]:
    try:
        yield from file.iter_batches(batch_size=ROWS, columns=list(fields))
    except (ValueError, OSError) as error:
        raise UserError(f"data.source: {path} is damaged: {_line(error)}") from error


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
