"""The data of a run: from `data.source` to the sequences of step n. Needs numpy, not JAX.

`sources` (file names) -> `corpora` and `tokenizers` (text), or `token_files` (ids) -> `batches`.
`python -m jaxptd.data` tokenizes text once, into a file that later runs memory-map.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxptd.data.batches import ShuffledWindows, Windows, WindowsInOrder, number_documents
from jaxptd.data.concatenated import Concatenated
from jaxptd.data.corpora import tokenize
from jaxptd.data.ids import scan_ids
from jaxptd.data.sources import find_files
from jaxptd.data.token_files import is_token_file, open_tokens
from jaxptd.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from jaxptd.errors import UserError
from jaxptd.fields import check_range, checked

if TYPE_CHECKING:
    from jaxptd.config import DataConfig  # imports JAX

__all__ = [
    "ByteTokenizer",
    "Data",
    "ShuffledWindows",
    "Tokenizer",
    "Windows",
    "WindowsInOrder",
    "load_tokenizer",
    "number_documents",
    "open_data",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    """The two splits of a corpus.

    Args:
        train: the beginning of the corpus, in random order.
        validation: the end of the corpus, in order; None if `data.validation_fraction` is 0.
    """

    train: Windows
    validation: Windows | None


@checked("jaxptd.open_data")
def open_data(
    config: "DataConfig", tokenizer: Tokenizer, *, seq_length: int, vocab_size: int, seed: int
) -> Data:
    """Opens the data of a run.

    >>> from jaxptd import DataConfig
    >>> config, sizes = DataConfig(source=__file__), {"seq_length": 16, "vocab_size": 257}
    >>> open_data(config, load_tokenizer("bytes"), **sizes, seed=0).train.rows([0, 1]).shape
    (2, 17)

    Text is read and tokenized here, each document followed by the end of document; `.bin` files are
    memory-mapped, and their ids used unchanged, whatever `tokenizer` is.

    Raises:
        UserError: a source is missing or broken, text and token files are mixed, the tokenizer or
            an id does not fit `vocab_size`, the tokenizer cannot tell documents apart, or a split
            is shorter than one sequence.
    """
    for name, value in (("seq_length", seq_length), ("vocab_size", vocab_size)):
        check_range("jaxptd.open_data", name, value, least=1)
    check_range("jaxptd.open_data", "seed", seed, least=0)
    files = find_files(config.source)
    if config.documents == "apart" and _are_token_files(files):
        _check_end_of_document(config, tokenizer, vocab_size)
    tokens: np.ndarray | Concatenated
    if _are_token_files(files):
        tokens = open_tokens(files)
        scan_ids(tokens, vocab_size)
    else:
        tokens = _read_text(files, tokenizer, vocab_size)
    sizes = {"seq_length": seq_length, "vocab_size": vocab_size}
    if config.validation_fraction == 0:
        return Data(train=ShuffledWindows(tokens, seed=seed, **sizes), validation=None)
    split = _validation_start(len(tokens), config.validation_fraction, seq_length)
    return Data(
        train=ShuffledWindows(tokens[:split], seed=seed, **sizes),
        validation=WindowsInOrder(tokens[split:], **sizes),
    )


def _are_token_files(files: Sequence[Path]) -> bool:
    """True if the files hold ids, False if they hold text. Raises UserError for a mixture."""
    text = [path for path in files if not is_token_file(path)]
    ids = [path for path in files if is_token_file(path)]
    if text and ids:
        raise UserError(
            f"data.source mixes tokens ({ids[0]}) with text ({text[0]}); tokenize the text first, "
            "with python -m jaxptd.data, or use one kind"
        )
    return bool(ids)


def _check_end_of_document(config: "DataConfig", tokenizer: Tokenizer, vocab_size: int) -> None:
    if config.tokenizer == "bytes" and vocab_size > tokenizer.vocab_size:
        raise UserError(
            "data.documents=apart has to know the end of document of these token files, which "
            f"data.tokenizer=bytes may not have made (model.vocab_size={vocab_size}); name the "
            "tokenizers JSON file that made them, or use model.vocab_size=null"
        )


def _read_text(files: Sequence[Path], tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size={vocab_size} is below the tokenizer's {tokenizer.vocab_size}; "
            f"use {tokenizer.vocab_size} or more, or null"
        )
    return np.concatenate(list(tokenize(files, tokenizer)))


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
                f"sequence takes model.seq_length + 1 = {shortest}; {_remedy(num_tokens, shortest)}"
            )
    return num_tokens - validation


def _remedy(num_tokens: int, shortest: int) -> str:
    others = "more data or a smaller model.seq_length"
    least = math.ceil(1000 * shortest / num_tokens)
    if least > 500:
        return f"use {others}, or data.validation_fraction=0"
    return f"use {least / 1000} to {(1000 - least) / 1000}, 0 for no validation, {others}"
