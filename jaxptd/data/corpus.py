"""The tokens of a source's files, split into training and validation. N is their number."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxptd.data.batches import BLOCK, Tokens, scan_ids
from jaxptd.data.chats import Chats
from jaxptd.data.corpora import tokenize, tokenize_answers, tokenize_pairs
from jaxptd.data.lengths import Piece, Records
from jaxptd.data.token_files import is_token_file, layout_of, open_tokens
from jaxptd.data.tokenizers import Tokenizer, spelling
from jaxptd.errors import UserError, quoted
from jaxptd.stores import Place

if TYPE_CHECKING:
    from jaxptd.config import DataConfig  # imports JAX


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """The tokens of a source.

    Args:
        tokens: ids[N].
        counted: bool[N], False for tokens that are no targets; None if all are.
        ends: the token behind each document, int64; None if the ids show it.
        remarks: what a user should know about how the text was read, one line each.
        middles: of pairs, the first token of each rejected text, int64.
    """

    tokens: Tokens
    counted: np.ndarray | None = None
    ends: np.ndarray | None = None
    remarks: tuple[str, ...] = ()
    middles: np.ndarray | None = None

    def __getitem__(self, part: slice) -> "Corpus":
        start, stop, _ = part.indices(len(self.tokens))
        ends, middles = self.ends, self.middles
        return Corpus(
            self.tokens[part],
            None if self.counted is None else self.counted[part],
            None if ends is None else ends[(ends > start) & (ends <= stop)] - start,
            middles=None
            if middles is None
            else middles[(middles > start) & (middles < stop)] - start,
        )


def read_corpus(
    files: Sequence[Place],
    config: "DataConfig",
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    vocab_size: int,
) -> Corpus:
    """Reads the files of a source: maps token files, reads and tokenizes text.

    Args:
        files: of the source.
        config: says how to read them.
        tokenizer: of text.
        seq_length: a record of more tokens, and one, is too long.
        vocab_size: upper bound of the ids.

    Raises:
        UserError: a file is broken, text and token files are mixed, prompts or chats are wanted
            from token files, the tokenizer or an id does not fit `vocab_size`, a record is too
            long, or the tokenizer cannot tell documents apart.
    """
    if not _are_token_files(files):
        return _read_text(files, config, tokenizer, sizes=(seq_length, vocab_size))
    _check_records(files, config)
    if config.apart:
        _check_end_of_document(files, config, tokenizer, vocab_size=vocab_size)
    tokens = open_tokens(files)
    scan_ids(tokens, vocab_size)
    whole = config.documents == "whole"
    ends = document_ends(tokens, tokenizer.end_of_document) if whole else None
    remarks = [remark for path in files for remark in about_ids(path, tokenizer)]
    return Corpus(tokens, ends=ends, remarks=tuple(remarks))


def document_ends(tokens: Tokens, end_of_document: int) -> np.ndarray:
    """The token behind each document, int64; reads all tokens."""
    count = len(tokens)
    found = [
        np.flatnonzero(np.asarray(tokens[first : first + BLOCK]) == end_of_document) + first + 1
        for first in range(0, count, BLOCK)
    ]
    ends = np.concatenate(found) if found else np.empty(0, np.int64)
    return ends if len(ends) and ends[-1] == count else np.append(ends, count)


def about_ids(path: Place, tokenizer: Tokenizer) -> Iterator[str]:
    """Says how the ids of a `.bin` file were read, where that is not obvious."""
    layout = layout_of(path)
    if layout.guessed:
        yield (
            f"{path} has no header; its ids were read as 32 bits, judging by their pattern "
            "(`jaxptd data` writes files with a header)"
        )
    written = (layout.vocab_size, layout.end_of_document)
    expected = (tokenizer.vocab_size, tokenizer.end_of_document)
    if layout.vocab_size is not None and written != expected:
        yield (
            f"warning: {path} was made with a tokenizer of {written[0]} ids whose documents end "
            f"with {written[1]}, but data.tokenizer has {expected[0]} and {expected[1]}; name the "
            "tokenizer that made it"
        )


def check_vocabulary(tokens: int, vocab_size: int) -> None:
    """Raises UserError for a model whose vocabulary is smaller than the tokenizer's."""
    if vocab_size < tokens:
        raise UserError(
            f"model.vocab_size={vocab_size} is below the tokenizer's {tokens}; use {tokens} or "
            "more, or null"
        )


def split_corpus(
    corpus: Corpus, fraction: float, *, seq_length: int, whole: bool = False
) -> tuple[Corpus, Corpus | None]:
    """Splits off the end of a corpus for validation; None if the fraction is 0.

    whole: between two documents.

    Raises:
        UserError: a split is shorter than one sequence, or holds no document that stays whole.
    """
    if fraction == 0:
        return corpus, None
    if whole:
        assert corpus.ends is not None
        split = _between_documents(corpus.ends, fraction)
    else:
        split = _validation_start(len(corpus.tokens), fraction, seq_length)
    return corpus[:split], corpus[split:]


def _are_token_files(files: Sequence[Place]) -> bool:
    """True if the files hold ids, False if they hold text. Raises UserError if both occur."""
    text = [path for path in files if not is_token_file(path)]
    ids = [path for path in files if is_token_file(path)]
    if text and ids:
        raise UserError(
            f"data.source mixes tokens ({ids[0]}) with text ({text[0]}); tokenize the text first, "
            "with jaxptd data, or use one kind"
        )
    return bool(ids)


def _check_records(files: Sequence[Place], config: "DataConfig") -> None:
    """Raises UserError for settings that token files have no records for."""
    for name, unset, what in (
        ("prompt_field", None, "cannot tell prompts from answers"),
        ("rejected_field", None, "hold no pairs"),
        ("messages_field", None, "hold no chats"),
        ("format", "auto", "hold no chats"),
        ("too_long", "split", "may not show where records end"),
    ):
        if (given := getattr(config, name)) != unset:
            raise UserError(
                f"data.{name}={given!r}: {files[0]} holds tokens, which {what}; name the .jsonl "
                f"they were made from, or use data.{name}={unset or 'null'}"
            )


def _check_end_of_document(
    files: Sequence[Place], config: "DataConfig", tokenizer: Tokenizer, *, vocab_size: int
) -> None:
    ends = [(path, layout_of(path).end_of_document) for path in files]
    for path, end in ends:
        if end not in (None, tokenizer.end_of_document):
            raise UserError(
                f"data.documents=apart: documents in {path} end with {end}, but data.tokenizer's "
                f"end with {tokenizer.end_of_document}; name the tokenizer that made it"
            )
    if all(end is not None for _, end in ends):
        return
    if config.tokenizer == "bytes" and vocab_size > tokenizer.vocab_size:
        raise UserError(
            "data.documents=apart must know the end of document in these token files, which "
            f"data.tokenizer=bytes may not have made (model.vocab_size={vocab_size}); name the "
            "tokenizer.json that made them, or use model.vocab_size=null"
        )


def _read_text(
    files: Sequence[Place], config: "DataConfig", tokenizer: Tokenizer, *, sizes: tuple[int, int]
) -> Corpus:
    """Reads and tokenizes text; sizes: seq_length and vocab_size."""
    spelled: Counter[str] = Counter()
    chats = Chats(config, tokenizer, spelled) if config.has_chats else None
    records = Records(config, sizes[0])
    pieces = records.fit(_pieces(files, config, tokenizer, chats, spelled))
    documents, masks, middles = zip(*pieces, strict=True)
    ids = np.concatenate(documents)
    counted = None if config.counts_all else np.concatenate(masks)
    check_ids(ids, tokenizer, sizes[1])
    remarks = [*(about_begin(tokenizer) if chats is None else chats.remarks)]
    if chats is not None or config.rejected_field is not None:
        remarks += records.about_targets(ids, counted)
    remarks += records.remarks()
    if config.special_tokens in (
        "auto",
        tokenizer.special_tokens,
    ):  # otherwise the objective decides how
        remarks += about_spellings(spelled, tokenizer, fixed=chats is not None)
    ends, whole = None, config.documents == "whole"
    if chats is not None or whole or config.too_long == "cut":
        ends = np.cumsum([len(each) for each in documents], dtype=np.int64)
        if chats is None and not whole:  # a text may spell out the end of a document
            ends = np.union1d(ends, np.flatnonzero(ids == tokenizer.end_of_document) + 1)
    starts = None
    if config.rejected_field is not None and ends is not None:
        starts = np.array(middles, np.int64) + np.pad(ends[:-1], (1, 0))
    return Corpus(ids, counted, ends, tuple(remarks), starts)


def _pieces(
    files: Sequence[Place],
    config: "DataConfig",
    tokenizer: Tokenizer,
    chats: Chats | None,
    spelled: Counter[str],
) -> Iterator[Piece]:
    """Reads and tokenizes the records of a source."""
    if chats is not None:
        return chats.read(files)
    texts = {"spelled": spelled}
    answers = [name for name in (config.prompt_field, config.text_field) if name is not None]
    if config.rejected_field is not None:
        return tokenize_pairs(files, tokenizer, [*answers, config.rejected_field], **texts)
    if config.prompt_field is not None:
        return itertools.starmap(Piece, tokenize_answers(files, tokenizer, answers, **texts))
    every = tokenize(files, tokenizer, spelled, text_field=config.text_field)
    return (Piece(ids, None) for ids in every)


def check_ids(ids: np.ndarray, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises UserError if a text has a token that the model's vocabulary lacks.

    A tokenizer may be larger than the model if no text uses its last tokens, such as `[PAD]`.
    """
    if tokenizer.vocab_size <= vocab_size or (largest := int(ids.max(initial=0))) < vocab_size:
        return
    if tokenizer.end_of_document >= vocab_size:
        check_vocabulary(tokenizer.vocab_size, vocab_size)
    raise UserError(
        f"model.vocab_size={vocab_size}, but the text has the token "
        f"{spelling(tokenizer, largest)} with id {largest}; leave it out of the text, use the "
        "model's tokenizer or, for a model trained from scratch, "
        f"model.vocab_size={tokenizer.vocab_size} or null"
    )


def about_begin(tokenizer: Tokenizer) -> Iterator[str]:
    """Says which tokens each document begins with, if any."""
    if tokenizer.begin:
        names = {token: name for name, token in tokenizer.special.items()}
        shown = " ".join(names.get(token, str(token)) for token in tokenizer.begin)
        yield (
            f"each document begins with {shown}, as the tokenizer's files say; "
            "data.begin_token=none leaves that out"
        )


def about_spellings(
    spelled: Counter[str], tokenizer: Tokenizer, *, fixed: bool = False
) -> Iterator[str]:
    """Says how spelled-out special tokens were read, if there are any; fixed: no other way."""
    if not spelled:
        return
    number, names = spelled.total(), [quoted(name) for name, _ in spelled.most_common(3)]
    shown = ", ".join(names) + (", ..." if len(spelled) > len(names) else "")
    times = "once" if number == 1 else f"{number} times"
    if fixed:
        yield (
            f"warning: messages spell out special tokens {times} ({shown}), which are read as "
            "these tokens, as if the chat template had written them"
        )
    elif tokenizer.special_tokens == "parse":
        yield (
            f"the text spells out special tokens {times} ({shown}): read as these tokens; "
            "data.special_tokens=text reads them as plain text"
        )
    else:
        yield (
            f"the text spells out special tokens {times} ({shown}): read as plain text; "
            "data.special_tokens=parse reads them as these tokens"
        )


def _validation_start(num_tokens: int, fraction: float, seq_length: int) -> int:
    """Index of the first validation token. Both splits hold at least one sequence."""
    validation = round(num_tokens * fraction)
    shortest = seq_length + 1
    for split, size in (
        ("leaves validation", validation),
        ("leaves training", num_tokens - validation),
    ):
        if size < shortest:
            raise UserError(
                f"data.validation_fraction={fraction} of {num_tokens} tokens {split} {size}, one "
                f"sequence takes {shortest}; {_remedy(num_tokens, shortest)}"
            )
    return num_tokens - validation


def _between_documents(ends: np.ndarray, fraction: float) -> int:
    """Index of the first validation token: the document's that is nearest to the fraction."""
    if len(ends) < 2:
        raise UserError(
            f"data.validation_fraction={fraction} holds out whole documents with data.documents="
            "whole, but there is only one; use more data, or data.validation_fraction=0"
        )
    start = ends[-1] - round(int(ends[-1]) * fraction)
    return int(ends[np.abs(ends[:-1] - start).argmin()])


def _remedy(num_tokens: int, shortest: int) -> str:
    otherwise = "more data or a smaller model.seq_length"
    least = math.ceil(1000 * shortest / num_tokens)
    if least > 500:
        return f"use {otherwise}, or data.validation_fraction=0"
    return f"use {least / 1000} to {(1000 - least) / 1000}, 0 for no validation, {otherwise}"
