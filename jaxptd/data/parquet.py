"""Reads the text of parquet files, with pyarrow: the `parquet` extra."""

import importlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from jaxptd.errors import UserError, install, quoted
from jaxptd.stores import Place, StorePath, open_binary

LISTED = 8  # most columns that an error lists
ROWS = 1024  # in memory at a time
SUFFIX = ".parquet"


def read_records(path: Place, fields: Sequence[str]) -> Iterator[list[str]]:
    """Yields these columns of each row; the last is the text, and rows without text are skipped.

    Raises:
        UserError: pyarrow is missing, or the file is damaged or lacks such a column of strings.
    """
    needs = f"it needs columns of strings, {' and '.join(map(json.dumps, fields))}"
    file = _opened(path)
    _check_columns(file, path, fields, needs)
    row = 0
    for batch in _batches(file, path, fields):
        for texts in zip(*(_column(batch, name, path, row) for name in fields), strict=True):
            row += 1
            for name, text in zip(fields, texts, strict=True):
                if not isinstance(text, str):
                    raise UserError(
                        f"data.source: {path} row {row} has no string {json.dumps(name)}; {needs}"
                    )
            if texts[-1]:
                yield list(texts)


def read_values(
    path: Place, fields: Sequence[str], optional: Sequence[str], *, remedy: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each row's place, and these columns of it; a null inside a value is left out.

    Args:
        path: of the file.
        fields: columns that it must have.
        optional: columns that it may have.
        remedy: says how to name other columns.

    Raises:
        UserError: as `read_records`.
    """
    file = _opened(path)
    columns = [*fields, *(name for name in optional if name in file.schema_arrow.names)]
    _check_columns(file, path, columns, remedy)
    row = 0
    for batch in _batches(file, path, columns):
        for values in zip(*(_column(batch, name, path, row) for name in columns), strict=True):
            row += 1
            yield f"{path} row {row}", dict(zip(columns, map(_given, values), strict=True))


def _given(value: Any) -> Any:
    """A value without the keys that are null: Arrow gives all objects of a column the same keys."""
    if isinstance(value, dict):
        return {key: _given(each) for key, each in value.items() if each is not None}
    return [_given(each) for each in value] if isinstance(value, list) else value


def _check_columns(file: Any, path: Place, fields: Sequence[str], needs: str) -> None:
    """Raises UserError unless the file has each of these columns once."""
    columns = file.schema_arrow.names
    for name in fields:
        if columns.count(name) != 1:
            many = "two columns" if name in columns else "no column"
            shown = ", ".join(map(json.dumps, map(quoted, columns[:LISTED]))) or "none"
            raise UserError(
                f"data.source: {path} has {many} {json.dumps(name)}; {needs}, and there are {shown}"
            )


def columns_of(path: Place) -> list[str]:
    """Names of a file's columns. Raises UserError as `read_records`."""
    return list(_opened(path).schema_arrow.names)


def _column(batch: Any, name: str, path: Place, before: int) -> list[Any]:
    """The values of a column. Raises UserError for text that is not UTF-8."""
    column = batch.column(name)
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        for number, value in enumerate(column, start=before + 1):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"data.source: {path} row {number}, column {json.dumps(name)} is not UTF-8 "
                    f"(byte {error.start} is 0x{error.object[error.start]:02x}); convert it"
                ) from error
        raise


def _opened(path: Place) -> Any:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError(
            f"data.source: {path} is parquet; install pyarrow to read it ({install('parquet')}), "
            "or write it as .jsonl"
        ) from error
    try:
        return parquet.ParquetFile(open_binary(path) if isinstance(path, StorePath) else path)
    except UserError:  # which is a ValueError: the store cannot be read
        raise
    except ValueError as error:  # pyarrow's errors are ValueErrors or OSErrors
        raise UserError(f"data.source: {path} is damaged: {_line(error)}") from error


def _batches(file: Any, path: Place, fields: Sequence[str]) -> Iterator[Any]:
    try:
        yield from file.iter_batches(batch_size=ROWS, columns=list(fields))
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(f"data.source: {path} is damaged: {_line(error)}") from error


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
