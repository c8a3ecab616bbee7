"""The data of a run: from `data.source` to the sequences of step n. Needs numpy, not JAX.

`sources` (file names) -> `corpora` and `tokenizers` (text), or `token_files` (ids) -> `corpus` ->
`batches`.
`python -m jaxptd.data` tokenizes text once, into a file that later runs memory-map.
"""

import dataclasses
from typing import TYPE_CHECKING

from jaxptd.data.batches import (
    NOT_COUNTED,
    ShuffledWindows,
    Windows,
    WindowsInOrder,
    number_documents,
)
from jaxptd.data.corpus import read_corpus, split_corpus
from jaxptd.data.sources import find_files
from jaxptd.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from jaxptd.fields import check_range, checked

if TYPE_CHECKING:
    from jaxptd.config import DataConfig  # imports JAX

__all__ = [
    "NOT_COUNTED",
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
            an id does not fit `vocab_size`, the tokenizer cannot tell documents apart, a split is
            shorter than one sequence, or its tokens are all of prompts.
    """
    for name, value in (("seq_length", seq_length), ("vocab_size", vocab_size)):
        check_range("jaxptd.open_data", name, value, least=1)
    check_range("jaxptd.open_data", "seed", seed, least=0)
    sizes = {"seq_length": seq_length, "vocab_size": vocab_size}
    corpus = read_corpus(find_files(config.source), config, tokenizer, vocab_size=vocab_size)
    train, end = split_corpus(corpus, config.validation_fraction, seq_length=seq_length)
    return Data(
        train=ShuffledWindows(train.tokens, seed=seed, counted=train.counted, **sizes),
        validation=WindowsInOrder(end.tokens, counted=end.counted, **sizes) if end else None,
    )
