"""Reads documents from text files and tokenizes them.

- `.jsonl`: one JSON object per line, whose "text" is a document (other fields are ignored, empty
  lines and empty texts skipped); with `data.prompt_field` another field is its prompt;
- `.parquet`: the same columns of its rows;
- any other file: UTF-8 text, the whole file is one document, line ends unchanged, a byte order mark
  dropped.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxptd.data.parquet import is_parquet, read_records
from jaxptd.data.tokenizers import Tokenizer, spellings, with_begin
from jaxptd.errors import UserError

TEXT = "text"  # the field of a jsonl line that holds its document
BLANK = 8  # ids behind a text's own end mark, if they are spaces, are left out


def read_documents(path: Path) -> Iterator[str]:
    """Yields the documents of one file, in order; records are read one by one.

    Raises:
        UserError: the file cannot be read, holds no text, is binary, or a record has no string
            "text"; names the file and the line or row.
    """
    records = _read_records(path, [TEXT]) if _has_records(path) else _read_text(path)
    for (text,) in _not_empty(path, records):
        yield text


def read_answers(path: Path, prompt_field: str) -> Iterator[list[str]]:
    """Yields the prompt and the answer, the "text", of each record of a .jsonl or .parquet file.

    Raises:
        UserError: as `read_documents`, or the file has no records.
    """
    if not _has_records(path):
        raise UserError(
            f"data.prompt_field={prompt_field!r}: {path} has no fields; write its records as "
            ".jsonl or .parquet, or use data.prompt_field=null"
        )
    yield from _not_empty(path, _read_records(path, [prompt_field, TEXT]))


def tokenize(
    files: Iterable[Path], tokenizer: Tokenizer, spelled: Counter[str] | None = None
) -> Iterator[np.ndarray]:
    """Yields the tokens of each document of each file, 1D, from its begin to its end of document.

    A text that begins or ends so by itself gets no second one.

    Args:
        files: of text.
        tokenizer: of the text.
        spelled: counts the special tokens that texts spell.

    Raises:
        UserError: as `read_documents`.
    """
    count = _count(tokenizer, spelled)
    for path in files:
        for text in read_documents(path):
            count(text)
            yield _document(tokenizer, [tokenizer.encode(text)])


def tokenize_answers(
    files: Iterable[Path],
    tokenizer: Tokenizer,
    prompt_field: str,
    spelled: Counter[str] | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the tokens of each record, prompt, answer and end of document, and which are counted.

    Prompt and answer are tokenized apart, as a prompt is that a model is asked to continue. The
    second array, of bool, is False for the tokens of the prompt and those before it.

    Raises:
        UserError: as `read_answers`.
    """
    count = _count(tokenizer, spelled)
    for path in files:
        for prompt, answer in read_answers(path, prompt_field):
            count(prompt)
            count(answer)
            answer_ids = tokenizer.encode(answer)
            given = with_begin(tokenizer, tokenizer.encode(prompt).tolist())
            ids = _document(tokenizer, [np.array(given, answer_ids.dtype), answer_ids])
            yield ids, np.arange(len(ids)) >= len(given)


def _document(tokenizer: Tokenizer, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The ids of a document, with those that begin it and the one that ends it, each once."""
    ids = np.concatenate(parts)
    begin, end = (np.array(x, ids.dtype) for x in (tokenizer.begin, [tokenizer.end_of_document]))
    tail = ids[-BLANK:]
    ends = np.flatnonzero(tail == end)
    if ends.size and not tokenizer.decode(tail[ends[-1] + 1 :].tolist()).strip():
        ids, end = ids[: len(ids) - len(tail) + ends[-1] + 1], end[:0]
    if np.array_equal(ids[: len(begin)], begin):
        begin = begin[:0]
    return np.concatenate([begin, ids, end])


def _count(tokenizer: Tokenizer, spelled: Counter[str] | None) -> Callable[[str], None]:
    """A function that counts the special tokens that a text spells."""
    pattern = spellings(tokenizer)
    if pattern is None or spelled is None:
        return lambda text: None
    return lambda text: spelled.update(pattern.findall(text))


def _has_records(path: Path) -> bool:
    return _is_jsonl(path) or is_parquet(path)


def _is_jsonl(path: Path) -> bool:
    return path.suffix.lower() == ".jsonl"


def _read_records(path: Path, fields: Sequence[str]) -> Iterator[list[str]]:
    """Yields these fields of each record whose last one, the text, is not empty."""
    if _is_jsonl(path):
        yield from _read_jsonl(path, fields)
    for texts in read_records(path, fields) if is_parquet(path) else ():
        for text in texts:
            _check_unicode(text, str(path))
        yield texts


def _not_empty(path: Path, records: Iterable[list[str]]) -> Iterator[list[str]]:
    """Yields the records of a file. Raises UserError if there are none, or it cannot be read."""
    empty = True
    try:
        for record in records:
            empty = False
            yield record
    except OSError as error:
        raise UserError(f"data.source: cannot read {path}: {error.strerror}") from error
    if empty:
        raise UserError(f"data.source: {path} holds no text; leave it out")


def _read_text(path: Path) -> Iterator[list[str]]:
    if text := _decode(path.read_bytes(), str(path)):
        yield [text]


def _read_jsonl(path: Path, fields: Sequence[str]) -> Iterator[list[str]]:
    """Yields these fields of each line; the last is the text, without which a line is skipped."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip() and (texts := _texts_of(line, f"{path} line {number}", fields))[-1]:
                yield texts


def _texts_of(line: bytes, where: str, fields: Sequence[str]) -> list[str]:
    needs = f"each line is an object with {' and '.join(map(json.dumps, fields))}"
    decoded = _decode(line, where)
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError) as error:  # not JSON, a number too long, nested too deep
        raise UserError(f"data.source: {where} is not JSON ({error}); {needs}") from error
    texts = []
    for field in fields:
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UserError(f"data.source: {where} has no string {json.dumps(field)}; {needs}")
        _check_unicode(text, where)
        texts.append(text)
    return texts


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, \ud800
        raise UserError(
            f"data.source: {where}: {text[error.start]!a} is half a surrogate pair; remove it"
        ) from error


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
