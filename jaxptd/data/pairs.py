"""Samples of pairs of texts, of which one is better, for `model.preference`.

A pair is one record: its chosen text, then its rejected one, each with the prompt. So whole pairs
share a sequence, packed as `packing` packs records. In a sequence the chosen text of pair p is
document 2 p, the rejected one is document 2 p + 1.

Letters: T = seq_length, R pairs, K pairs of some samples.
"""

import dataclasses
from functools import cached_property

import numpy as np

from jaxptd.data.packing import NO_RECORD, WholeRecords
from jaxptd.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs(WholeRecords):
    """Sequences of whole pairs and padding.

    Args:
        middles: the first token of each rejected text, int64[R]; the others as of `WholeRecords`.
    """

    middles: np.ndarray = dataclasses.field(kw_only=True)

    @cached_property
    def scores(self) -> np.ndarray:
        """The reference model's log-probabilities of both texts, float64[R, 2], to be filled in.

        NaN where they are not known yet.
        """
        return np.full((len(self.ends), 2), np.nan)

    def documents(self, indices: np.ndarray, end_of_document: int) -> np.ndarray:
        found = self._members(indices)
        rejected = found.within >= found.spread(self._chosen(found.record_K))
        document = 2 * found.spread(found.nth_K) + rejected
        return self._filled(found, indices, document, fill=NO_RECORD)

    def reference(self, indices: np.ndarray) -> np.ndarray:
        """Sample numbers[n] -> the log-probability of each text at its first token, float64[n, T].

        Zeros elsewhere.

        Raises:
            UserError: it is not known yet.
        """
        found = self._members(indices)
        scores_K2 = self.scores[found.record_K]
        if np.isnan(scores_K2).any():
            raise UserError(
                "the reference's log-probabilities of these pairs are not known; jaxptd.train "
                "computes them before the first step"
            )
        filled = np.zeros((len(indices), self.seq_length))
        middle_K = found.column_K + self._chosen(found.record_K)
        for column_K, score_K in zip((found.column_K, middle_K), scores_K2.T, strict=True):
            filled[found.row_K, column_K] = score_K
        return filled

    def put_scores(self, index: int, score_K: np.ndarray) -> None:
        """Fills in the log-probabilities of a sample's documents, in their order."""
        records = self.records(index)
        self.scores[records] = score_K[: 2 * len(records)].reshape(-1, 2)

    def _chosen(self, record_K: np.ndarray) -> np.ndarray:
        """Tokens of the chosen text of each pair."""
        return self.middles[record_K] - self._starts(record_K)


def joined(
    chosen: tuple[np.ndarray, np.ndarray], rejected: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, int]:
    """The ids and the targets of two texts -> those of both, and where the second begins.

    The first token of the rejected text is no target: nothing of the pair predicts it.

    Raises:
        UserError: a text has no two tokens, or no target.
    """
    for name, (ids, counted) in (("chosen", chosen), ("rejected", rejected)):
        if len(ids) < 2 or not counted[1:].any():
            raise UserError(f"its {name} answer has no token to predict; leave the pair out")
    ids, counted = (np.concatenate(both) for both in zip(chosen, rejected, strict=True))
    middle = len(chosen[0])
    counted[[0, middle]] = False
    return ids, counted, middle
