"""Token ids that the model's vocabulary does not have."""

from collections.abc import Iterable

import numpy as np

from jaxptd.data.mapped import Concatenated, locate
from jaxptd.errors import UserError

SCANNED = 2**26  # tokens that are looked at before a run begins: a tenth of a second from memory
BLOCK = 2**20  # tokens at a time


def check_ids(tokens: np.ndarray | Concatenated, start: int, *, end: int, vocab_size: int) -> None:
    """Raises UserError for the first id of tokens[start:end] outside [0, vocab_size).

    The error names the file and the position.
    """
    ids = np.asarray(tokens[start:end])
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(wrong):
        raise UserError(
            f"{locate(tokens, start + int(wrong[0]))} has id {ids[wrong[0]]}, outside the "
            f"model's {vocab_size} (0 to {vocab_size - 1}); use the tokenizer the "
            "data was made with, or a larger model.vocab_size"
        )


def scan_ids(tokens: np.ndarray | Concatenated, vocab_size: int) -> None:
    """Raises as `check_ids` for any of the tokens, or of many if there are very many.

    A tokenizer that is not the model's is found at once in this way, before the run writes a file.
    """
    for start in _starts(len(tokens)):
        check_ids(tokens, start, end=start + BLOCK, vocab_size=vocab_size)


def _starts(count: int) -> Iterable[int]:
    """First tokens of the blocks to scan: all, or as many as `SCANNED` has, evenly spaced."""
    if count <= SCANNED:
        return range(0, count, BLOCK)
    return np.linspace(0, count - BLOCK, SCANNED // BLOCK).astype(np.int64).tolist()
