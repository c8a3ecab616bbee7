"""Reads records from files: one JSON object per line, a JSON array of them, or rows of a table.

`.jsonl` (`.ndjson`, `.jsonlines`) and `.json` are JSON, `.csv` and `.tsv` are tables with column
names in the first row, and `.parquet` is read by `parquet.py`. All of them, and text, may be
compressed: `.gz`, `.bz2`, `.xz`, and `.zst` with the `zstandard` package.
"""

import bz2
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from jaxptd.data import parquet
from jaxptd.errors import UserError, install, quoted
from jaxptd.stores import Place, StorePath, open_binary

# ---- formats recognized by a file's first bytes, whatever its name -------------------------------

LONGEST = 512  # bytes to look at
_POINTER = b"version https://git-lfs.github.com/spec/"
# First bytes -> the format, and what to do.
_KNOWN = (
    (b"\x1f\x8b\x08", "compressed by gzip", "end its name in .gz, or decompress it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "end its name in .zst, or decompress it"),
    (b"BZh", "compressed by bzip2", "end its name in .bz2, or decompress it"),
    (b"\xfd7zXZ\x00", "compressed by xz", "end its name in .xz, or decompress it"),
    (b"\x04\x22\x4d\x18", "compressed by lz4", "decompress it"),
    (b"7z\xbc\xaf\x27\x1c", "an archive (7z)", "unpack it"),
    (b"PK\x03\x04", "a zip archive, as are .npz, .pt and .docx", "unpack it"),
    (b"PAR1", "parquet", "end its name in .parquet"),
    (b"ARROW1\x00\x00", "an Arrow file", "write it as .parquet or .jsonl"),
    (b"\x93NUMPY", "a numpy array", "write its ids with tofile, as uint16 or uint32, into a .bin"),
    (b"%PDF-", "a PDF", "extract its text"),
    (b"\xff\xfe", "text in UTF-16 or UTF-32", "convert it to UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "convert it to UTF-8"),
    (_POINTER, "a Git LFS pointer, not the file itself", "fetch it: git lfs pull"),
)


def check_signature(path: Place, start: bytes, *, ids: bool = False, inner: bool = False) -> None:
    """Raises UserError, with a remedy, for a file that is neither text nor bare ids.

    Args:
        path: of the file.
        start: its first bytes, decompressed if its name says that it is compressed.
        ids: the file should hold ids; then two bytes at the start prove nothing.
        inner: these bytes were decompressed.
    """
    for magic, kind, remedy in _KNOWN:
        if start.startswith(magic) and not (ids and len(magic) == 2):
            if inner:
                kind, remedy = f"{kind}, once decompressed", "name the file inside it"
            raise UserError(f"data.source: {path} is {kind}; {remedy}")


def is_pointer(start: bytes) -> bool:
    """True for the pointer that Git holds in place of a large file until `git lfs pull`."""
    return start.startswith(_POINTER)


# ---- records of a file ---------------------------------------------------------------------------

LINES, ARRAY, TABLES = (".jsonl", ".ndjson", ".jsonlines"), ".json", {".csv": ",", ".tsv": "\t"}
READ = 2**17  # bytes of a compressed file to read at a time
START = 2**20  # bytes of a file in which the first record is looked for
LISTED = 8  # most fields that an error lists

_JSON = {"NoneType": "null", "dict": "an object", "list": "an array", "int": "a number"}
_JSON |= {"float": "a number", "bool": "true or false"}

Fields = Sequence[str]  # the fields to read from each record; the last is its text


def _zstandard(path: Path | IO[bytes]) -> Any:
    try:
        import zstandard  # an optional extra
    except ImportError as error:
        raise UserError(
            f"data.source: {path if isinstance(path, Path) else path.name} is compressed by zstd; "
            f"install zstandard to read it ({install('zstd')}), or decompress it"
        ) from error
    return io.BufferedReader(_Frames(_plain(path), zstandard.ZstdDecompressor()))


class _Frames(io.RawIOBase):
    """Reads zstd frames in sequence; the library's own reader takes a truncated one for the end."""

    def __init__(self, file: IO[bytes], library: Any) -> None:
        self._file, self._library = file, library
        self._frame: Any = None
        self._waiting, self._ready = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._waiting or self._file.read(READ)
            if not data:
                if self._frame is not None:
                    raise EOFError("the compressed file ends before its last frame does")
                return 0
            self._frame = self._frame or self._library.decompressobj()
            self._ready, self._waiting = self._frame.decompress(data), b""
            if self._frame.eof:
                self._waiting, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


COMPRESSED: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstandard}
)


def kind_of(path: Place) -> str:
    """The suffix that tells what a file holds, in lower case, without a compression suffix."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return name.suffix.lower()


def has_records(path: Place) -> bool:
    """True if the name says that a file holds records."""
    return kind_of(path) in (*LINES, ARRAY, *TABLES, parquet.SUFFIX)


def open_bytes(path: Place) -> IO[bytes]:
    """Opens a file of text to read its bytes, decompressed if its name says that it is compressed.

    Raises:
        UserError: its first bytes are those of another format.
    """
    inner = path.suffix.lower() in COMPRESSED
    read = COMPRESSED.get(path.suffix.lower(), _plain)
    opened: Any = read(open_binary(path) if isinstance(path, StorePath) else path)
    try:
        check_signature(path, opened.peek(LONGEST)[:LONGEST], inner=inner)
    except BaseException:
        opened.close()
        raise
    return opened


@contextlib.contextmanager
def explained(path: Place) -> Iterator[None]:
    """Turns errors of the system and of decompression into one line that names the file."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise UserError(f"data.source: cannot read {path}: {error.strerror}") from error
        raise UserError(f"data.source: {path} is damaged: {error}") from error  # gzip's, bz2's
    except Exception as error:
        if isinstance(error, _damage()):
            raise UserError(f"data.source: {path} is damaged: {error}") from error
        raise


def _damage() -> tuple[type[Exception], ...]:
    """The errors of damaged compressed data; zstandard's if it is imported."""
    zstandard: Any = sys.modules.get("zstandard")
    return (EOFError, zlib.error, lzma.LZMAError, *((zstandard.ZstdError,) if zstandard else ()))


def _plain(path: Path | IO[bytes]) -> IO[bytes]:
    return open(path, "rb") if isinstance(path, Path) else path


def read_records(path: Place, fields: Fields) -> Iterator[list[str]]:
    """Yields these fields of each record; the last is the text, and empty ones are skipped.

    Raises:
        UserError: a record is damaged or lacks a field; names the file and the position.
        OSError: the file cannot be read.
    """
    kind = kind_of(path)
    if kind == parquet.SUFFIX:
        records = parquet.read_records(path, fields)
    elif kind in TABLES:
        rows = _rows(path, fields, TABLES[kind])
        records = ([row[field] for field in fields] for _, row in rows)
    else:
        objects = _objects(path, f"an object with {_named(fields)}")
        records = (_texts(record, fields, where, needs) for where, record, needs in objects)
    yield from (texts for texts in records if texts[-1])


def read_values(
    path: Place, fields: Fields, optional: Fields, *, remedy: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each record's place in the file, and these fields of it: any JSON values.

    Args:
        path: a file of records; the values of a table are texts.
        fields: every record has these.
        optional: read from the records that have them.
        remedy: says how to name other fields.

    Raises:
        UserError: as `read_records`.
        OSError: the file cannot be read.
    """
    kind = kind_of(path)
    if kind == parquet.SUFFIX:
        yield from parquet.read_values(path, fields, optional, remedy=remedy)
    elif kind in TABLES:
        yield from _rows(path, fields, TABLES[kind], optional=optional, remedy=remedy)
    else:
        for where, record, needs in _objects(path, f"an object with {_named(fields)}"):
            names = record if isinstance(record, dict) else {}
            if missing := [field for field in fields if field not in names]:
                hint = f"; it has {_listed(names)}: {remedy}" if names else ""
                raise UserError(
                    f"data.source: {where} has no field {json.dumps(missing[0])}; {needs}{hint}"
                )
            yield where, {name: names[name] for name in (*fields, *optional) if name in names}


def first_fields(path: Place) -> list[str]:
    """Names of the fields of text in a file's first record, or of its columns.

    Empty if the first `START` bytes do not hold a whole record.
    """
    kind = kind_of(path)
    if kind == parquet.SUFFIX:
        return parquet.columns_of(path)
    with open_bytes(path) as file:
        text = file.read(START).decode("utf-8-sig", errors="ignore").lstrip()
    if kind in TABLES:
        return next(csv.reader([text.partition("\n")[0]], delimiter=TABLES[kind]), [])
    try:
        record, _ = json.JSONDecoder().raw_decode(text.removeprefix("[").lstrip())
    except (ValueError, RecursionError):
        return []
    names = record if isinstance(record, dict) else {}
    return [name for name in names if isinstance(names[name], str)]


# ---- JSON ----------------------------------------------------------------------------------------


def _objects(path: Place, wanted: str) -> Iterator[tuple[str, Any, str]]:
    """Yields JSON values: of an array, one per line, or a single one.

    Each comes with its place in the file, and what is needed there: `wanted` describes an object.
    """
    with open_bytes(path) as file:
        start = file.peek(1).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]  # type: ignore[attr-defined]
        if start == b"[":
            needs = f"it must be an array of objects{wanted.removeprefix('an object')}"
            records = _parsed(file.read(), str(path), needs)
            for number, record in enumerate(records, start=1):
                yield f"{path} record {number}", record, needs
            return
        first = file.readline()
        lines: Iterable[bytes] = itertools.chain((first,), file)
        if kind_of(path) == ARRAY and _object(first) is None:  # otherwise read line by line
            data = first + file.read()
            if (record := _object(data)) is not None:
                yield str(path), record, f"write {wanted}, an array of them, or one per line"
                return
            lines = io.BytesIO(data)
        needs = f"each line must be {wanted}"
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path} line {number}"
                yield where, _parsed(line, where, needs), needs


def _object(data: bytes) -> Any:
    """The object in these bytes, over any number of lines; None if they are not one object."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None


def _parsed(data: bytes, where: str, needs: str) -> Any:
    text = decoded(data, where)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, a number too long, nested too deep
        raise UserError(f"data.source: {where} is not JSON ({error}); {needs}") from error


def _texts(record: Any, fields: Fields, where: str, needs: str) -> list[str]:
    """The fields of a record. Raises UserError for one that is not text."""
    for field in fields:
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            if isinstance(record, dict) and field in record:
                kind, name = type(record[field]).__name__, json.dumps(field)
                raise UserError(
                    f"data.source: {where} has no string {name}, but {_JSON.get(kind, kind)}; "
                    f"{needs}"
                )
            hint = f"; {_there(record, fields)}" if isinstance(record, dict) else ""
            raise UserError(
                f"data.source: {where} has no string {json.dumps(field)}; {needs}{hint}"
            )
    return [checked(record[field], where) for field in fields]


def _named(fields: Fields) -> str:
    return " and ".join(map(json.dumps, fields))


def _there(record: Mapping[str, Any], fields: Fields, remedy: str | None = None) -> str:
    """Lists the fields that exist, in case one of them was meant."""
    texts = [str(name) for name, value in record.items() if isinstance(value, str | None)]
    if not texts and record:
        lists = [name for name, value in record.items() if isinstance(value, list)]
        chats = (
            f"; if {quoted(lists[0])} is a chat, name it with data.messages_field" if lists else ""
        )
        return f"it has no text, only {', '.join(map(quoted, list(record)[:LISTED]))}{chats}"
    if remedy is None:
        remedy = "name the field of documents with data.text_field"
        if len(fields) > 1:
            remedy += ", the field of prompts with data.prompt_field"
    return f"it has {_listed(texts)}: {remedy}"


def _listed(names: Iterable[str]) -> str:
    texts = list(names)
    shown = ", ".join([quoted(name) for name in texts[:LISTED]])
    return (shown + (", ..." if len(texts) > LISTED else "")) or "none"


# ---- tables --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _long_fields() -> Iterator[None]:
    """Inside, fields of a table may be longer than the csv module's default limit."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _rows(
    path: Place,
    fields: Fields,
    delimiter: str,
    *,
    optional: Fields = (),
    remedy: str | None = None,
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the place of each row of a table and its fields; the first row names the columns."""
    with open_bytes(path) as file, _long_fields():
        lines = (decoded(line, f"{path} line {n}") for n, line in enumerate(file, start=1))
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
        try:
            names = rows.fieldnames or []
            for field in fields:
                if names.count(field) != 1:
                    if len(names) == 1 and (separator := _separator(names[0], field)):
                        raise UserError(
                            f"data.source: {path} separates columns by {separator!r}, but its name "
                            f"says {delimiter!r}; rewrite it that way, or as .jsonl"
                        )
                    many = "two columns" if field in names else "no column"
                    hint = _there(dict.fromkeys(names), fields, remedy)
                    raise UserError(f"data.source: {path} has {many} {json.dumps(field)}; {hint}")
            for row in rows:
                if None in row or None in row.values():
                    raise UserError(
                        f"data.source: {path} line {rows.line_num} has more or fewer fields than "
                        f"the first line, {len(names)}; fix it"
                    )
                where = f"{path} line {rows.line_num}"
                wanted = (*fields, *(name for name in optional if name in names))
                yield where, {name: checked(row[name], where) for name in wanted}
        except csv.Error as error:
            raise UserError(f"data.source: {path} line {rows.line_num}: {error}; fix it") from error


def _separator(line: str, field: str) -> str | None:
    """Finds the separator of columns in a line that contains this name; None if there is none."""
    return next(
        (each for each in ";\t|," if each in line and field in _names(line.split(each))), None
    )


def _names(parts: Sequence[str]) -> list[str]:
    return [part.strip(' "') for part in parts]


# ---- text ----------------------------------------------------------------------------------------


def checked(text: str, where: str) -> str:
    """The text. Raises UserError for half a surrogate pair, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"data.source: {where}: {text[error.start]!a} is half a surrogate pair; remove it"
        ) from error
    return text


def decoded(data: bytes, where: str) -> str:
    """Decodes strict UTF-8. Refuses NUL, which most binary formats have and text never has."""
    if (nul := data.find(b"\0")) >= 0:
        raise UserError(
            f"data.source: {where} is binary, not text (NUL at byte {nul}); "
            "use text, .jsonl or .bin files"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.source: {where} is not UTF-8 text (byte {error.start} is "
            f"0x{data[error.start]:02x}); convert it, or decompress it if it is compressed"
        ) from error
