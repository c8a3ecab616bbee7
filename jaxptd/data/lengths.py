"""Records that are too long for a sequence: `data.too_long` cuts them, leaves them out or refuses.

A sequence has model.seq_length + 1 tokens, for as many predictions as seq_length.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxptd.errors import UserError

if TYPE_CHECKING:
    from jaxptd.config import DataConfig


class Piece(NamedTuple):
    """The ids of a record, which of them count, and where a pair's rejected text begins."""

    ids: np.ndarray
    counted: np.ndarray | None
    middle: int = 0


class Records:
    """Counts the records of a source, and does with long ones what a config says.

    Args:
        config: of the data.
        seq_length: T.
    """

    def __init__(self, config: "DataConfig", seq_length: int) -> None:
        self._rule, self._longest, self._chats = config.too_long, seq_length + 1, config.has_chats
        self._name = "chats" if config.has_chats else "records"
        if config.rejected_field is not None:
            self._name = "pairs"
        self.number = self.left = self.too_long = self.empty = 0

    def fit(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yields the records that are left, none of which is longer than the config allows.

        Raises:
            UserError: a record is too long and the config refuses that, or none is left.
        """
        for ids, counted, middle in pieces:
            self.number += 1
            if len(ids) > self._longest:
                self.too_long += 1
                if self._rule == "refuse":
                    raise UserError(
                        f"data.too_long=refuse: record {self.number} of data.source has "
                        f"{len(ids)} tokens, and a sequence {self._longest}; use a larger "
                        "model.seq_length, or data.too_long=cut, drop or split"
                    )
                if self._rule == "drop":
                    continue
                if self._rule == "cut":
                    ids = ids[: self._longest]
                    counted = None if counted is None else counted[: self._longest]
            if counted is not None and not counted.any():
                self.empty += 1
                continue
            self.left += 1
            yield Piece(ids, counted, middle)
        if not self.left:
            raise UserError(
                f"data.source: no {self._name} are left: {self._long_ones}"
                f"{f', and {self.empty:,} have nothing that counts in the loss' * bool(self.empty)}"
            )

    @property
    def _long_ones(self) -> str:
        return (
            f"{self.too_long:,} of {self.number:,} {self._name} have more tokens than a sequence, "
            f"{self._longest:,}"
        )

    def about_targets(self, ids: np.ndarray, counted: np.ndarray | None) -> Iterator[str]:
        """Says how many chats or pairs and tokens were read, and how many of these are learned."""
        learned = len(ids) if counted is None else int(counted.sum())
        name = self._name if self.left != 1 else self._name.removesuffix("s")
        yield (
            f"{self.left:,} {name} with {len(ids):,} tokens, of which "
            f"{learned:,} ({learned / len(ids):.0%}) count in the loss"
        )

    def remarks(self) -> Iterator[str]:
        """Says how many records were too long, or had nothing to learn."""
        if self._rule == "cut":
            yield f"{self._long_ones}; they lost their ends (data.too_long=cut)"
        elif self._rule == "drop":
            yield f"{self._long_ones}; they were left out (data.too_long=drop)"
        elif self._chats and self.too_long:
            yield (
                f"{self._long_ones}; they go on in another one, which does not see their "
                "beginnings; data.too_long=cut, drop or refuse changes that"
            )
        if self.empty:
            yield (
                f"{self.empty:,} of {self.number:,} {self._name} have nothing that counts in the "
                "loss, and were left out"
            )
