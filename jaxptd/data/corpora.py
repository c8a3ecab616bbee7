"""Reads documents from text files and tokenizes them.

- `.jsonl`: one JSON object per line, whose "text" is a document (other fields are ignored, empty
  lines and empty texts skipped);
- any other file: UTF-8 text, the whole file is one document, line ends unchanged, a byte order mark
  dropped.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jaxptd.data.tokenizers import Tokenizer
from jaxptd.errors import UserError


def read_documents(path: Path) -> Iterator[str]:
    """Yields the documents of one file, in order; a .jsonl file is read line by line.

    Raises:
        UserError: the file cannot be read, holds no text, is binary, or a line of jsonl is not an
            object with "text"; names the file and the line.
    """
    empty = True
    try:
        for text in _read_jsonl(path) if path.suffix.lower() == ".jsonl" else _read_text(path):
            empty = False
            yield text
    except OSError as error:
        raise UserError(f"data.source: cannot read {path}: {error.strerror}") from error
    if empty:
        raise UserError(f"data.source: {path} holds no text; leave it out")


def tokenize(files: Iterable[Path], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yields the tokens of each document of each file, 1D, with the end of document last.

    Raises:
        UserError: as `read_documents`.
    """
    for path in files:
        for text in read_documents(path):
            tokens = tokenizer.encode(text)
            yield np.concatenate(
                [tokens, np.array([tokenizer.end_of_document], dtype=tokens.dtype)]
            )


def _read_text(path: Path) -> Iterator[str]:
    if text := _decode(path.read_bytes(), str(path)):
        yield text


def _read_jsonl(path: Path) -> Iterator[str]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip() and (text := _text_of(line, f"{path} line {number}")):
                yield text


def _text_of(line: bytes, where: str) -> str:
    decoded = _decode(line, where)
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError) as error:  # not JSON, a number too long, nested too deep
        raise UserError(
            f'data.source: {where} is not JSON ({error}); each line is an object with "text"'
        ) from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(
            f'data.source: {where} has no string "text"; each line is an object with "text"'
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, \ud800
        raise UserError(
            f"data.source: {where}: {text[error.start]!a} is half a surrogate pair; remove it"
        ) from error
    return text


def _decode(data: bytes, where: str) -> str:
    """Decodes strict UTF-8. Refuses NUL, which no text has and most binary formats do."""
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
