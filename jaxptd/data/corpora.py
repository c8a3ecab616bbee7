"""Reads documents from text files and tokenizes them.

- files of records, see `records.py`: the field `data.text_field` of each record is a document
  (other fields are ignored, empty texts skipped); with `data.prompt_field` another is its prompt;
- any other file: UTF-8 text, one document per file, with line ends unchanged and a byte order mark
  dropped.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jaxptd.data.lengths import Piece
from jaxptd.data.pairs import joined
from jaxptd.data.records import (
    decoded,
    explained,
    first_fields,
    has_records,
    open_bytes,
    read_records,
)
from jaxptd.data.tokenizers import Tokenizer, spellings, with_begin
from jaxptd.errors import UserError
from jaxptd.stores import Place

TEXT = "text"  # the field of a record that holds its document
LONGEST = 2**20  # characters of the first two lines to look at
PROMPTS = ("prompt", "instruction", "question", "input")  # usual names of their field
BLANK = 8  # up to this many ids of spaces after a text's own end mark are dropped


def read_documents(path: Place, text_field: str = TEXT) -> Iterator[str]:
    """Yields the documents of one file, in order; records are read one by one.

    Raises:
        UserError: the file cannot be read, holds no text, is binary, or a record has no string of
            that name; names the file and the line or row.
    """
    records = read_records(path, [text_field]) if has_records(path) else _read_text(path)
    for (text,) in _not_empty(path, records):
        yield text


def read_answers(
    path: Place, fields: Sequence[str], *, option: str = "prompt_field"
) -> Iterator[list[str]]:
    """Yields fields of each record, such as its prompt and its answer.

    option: of the section `data`, which needs records.

    Raises:
        UserError: as `read_documents`, or the file has no records.
    """
    if not has_records(path):
        named = fields[0] if option == "prompt_field" else fields[-1]
        raise UserError(
            f"data.{option}={named!r}: {path} has no fields; write its records as "
            f".jsonl or .parquet, or use data.{option}=null"
        )
    yield from _not_empty(path, read_records(path, fields))


def tokenize(
    files: Iterable[Place],
    tokenizer: Tokenizer,
    spelled: Counter[str] | None = None,
    *,
    text_field: str = TEXT,
) -> Iterator[np.ndarray]:
    """Yields the tokens of each document of each file, 1D, with its begin and end tokens.

    A text that already begins or ends with these tokens gets no second one.

    Args:
        files: of text.
        tokenizer: of the text.
        spelled: counts the special tokens that texts spell.
        text_field: record field that holds a document.

    Raises:
        UserError: as `read_documents`.
    """
    count = _count(tokenizer, spelled)
    for path in files:
        for text in read_documents(path, text_field):
            count(text)
            yield _document(tokenizer, [tokenizer.encode(text)])


def tokenize_answers(
    files: Iterable[Place],
    tokenizer: Tokenizer,
    fields: Sequence[str],
    *,
    spelled: Counter[str] | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields each record's tokens (prompt, answer, end of document) and which of them count.

    Prompt and answer are tokenized separately, as in generation. The second array, of bool, is
    False up to the end of the prompt.

    Args:
        files: of records.
        tokenizer: of the text.
        fields: names of the prompt's field and the answer's.
        spelled: counts the special tokens that texts spell.

    Raises:
        UserError: as `read_answers`.
    """
    count = _count(tokenizer, spelled)
    for path in files:
        for prompt, answer in read_answers(path, fields):
            count(prompt)
            count(answer)
            yield _answered(tokenizer, prompt, answer)


def tokenize_pairs(
    files: Iterable[Place],
    tokenizer: Tokenizer,
    fields: Sequence[str],
    *,
    spelled: Counter[str] | None = None,
) -> Iterator[Piece]:
    """Yields each pair's tokens: prompt and chosen answer, prompt and rejected answer.

    Each answer is tokenized as by `tokenize_answers`.

    Args:
        files: of records.
        tokenizer: of the text.
        fields: names of the prompt's field, if there is one, and of the answers'.
        spelled: counts the special tokens that texts spell.

    Raises:
        UserError: as `read_answers`.
    """
    count = _count(tokenizer, spelled)
    for path in files:
        records = read_answers(path, fields, option="rejected_field")
        for number, texts in enumerate(records, start=1):
            for text in texts:
                count(text)
            *prompts, chosen, rejected = texts
            prompt = "".join(prompts)
            both = [_answered(tokenizer, prompt, answer) for answer in (chosen, rejected)]
            try:
                yield Piece(*joined(*both))
            except UserError as error:
                raise UserError(f"data.source: {path} pair {number}: {error}") from error


def _answered(tokenizer: Tokenizer, prompt: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a prompt and its answer, and which are of the answer."""
    answer_ids = tokenizer.encode(answer)
    given = with_begin(tokenizer, tokenizer.encode(prompt).tolist())
    ids = _document(tokenizer, [np.array(given, answer_ids.dtype), answer_ids])
    return ids, np.arange(len(ids)) >= len(given)


def about_prompts(files: Iterable[Place], text_field: str) -> Iterator[str]:
    """Warns of fields that are named like a prompt and are not read, in the first file with some.

    Args:
        files: of text, read without `data.prompt_field`.
        text_field: the field that is read.
    """
    for path in filter(has_records, files):
        named = {name.lower(): name for name in first_fields(path) if name != text_field}
        if names := [named[usual] for usual in PROMPTS if usual in named]:
            shown, many = " and ".join(map(json.dumps, names)), len(names) > 1
            yield (
                f"warning: {path}: the field{'s' * many} {shown} {'are' if many else 'is'} not "
                f"read, only {json.dumps(text_field)}; data.prompt_field={names[0]} reads "
                f"{'the first' if many else 'it'}, as a prompt"
            )
            return


def _document(tokenizer: Tokenizer, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The ids of a document with its begin tokens and its end token, each once."""
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


def _not_empty(path: Place, records: Iterable[list[str]]) -> Iterator[list[str]]:
    """Yields the records of a file. Raises UserError if there are none, or it cannot be read."""
    empty = True
    with explained(path):
        for record in records:
            empty = False
            yield record
    if empty:
        raise UserError(f"data.source: {path} holds no text; leave it out")


def _read_text(path: Place) -> Iterator[list[str]]:
    with open_bytes(path) as file:
        text = decoded(file.read(), str(path))
    if _is_of_records(text):
        raise UserError(
            f"data.source: {path} has a JSON object in each line, but its name says text; rename "
            "it to .jsonl, so that each object is a record"
        )
    if text:
        yield [text]


def _is_of_records(text: str) -> bool:
    """True if the first two lines of a text are JSON objects."""
    lines = text[:LONGEST].split("\n", 2)[:2]
    return len(lines) == 2 and all(map(_is_object, lines))


def _is_object(line: str) -> bool:
    try:
        return line.startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
