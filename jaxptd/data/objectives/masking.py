"""Masked language modelling of pairs of sentences, BERT's objective.

A sample is `[CLS] A [SEP] B [SEP]`, T tokens without padding. A is the beginning of a window of the
corpus. In half of the samples B is the rest of the window, in the others the rest of another window
of the same epoch. 15 % of the ordinary tokens are predicted, to the nearest whole number; 80 % of
these are masked, 10 % are replaced by random tokens and 10 % stay.

Letters: B samples, T = seq_length, W = T - 3 tokens of the corpus in a sample, K predicted tokens
of a sample without special ones.
Source: Devlin et al., BERT, arXiv 1810.04805, section 3.1 and appendix A.
"""

import dataclasses
import functools

import numpy as np

from jaxptd.data.batches import NOT_COUNTED, Samples
from jaxptd.data.objectives.prepared import MaskIds, check_window, draw, shuffle
from jaxptd.errors import UserError

MARKS = 3  # [CLS] and two [SEP]
BELOW = 2**32  # halves of a drawn number


@dataclasses.dataclass(frozen=True)
class MaskedPairs:
    """Makes `tokens`, `token_types`, `mask` and `targets`, `[B, T]`, and `next_sentence`, `[B]`.

    token_types are 0 for `[CLS] A [SEP]` and 1 for `B [SEP]`. mask is 1 for tokens and 0 for
    padding. targets are the ids to predict, elsewhere -1. next_sentence is 0 if B follows A in the
    corpus, else 1.

    Args:
        ids: of the special tokens.
        seq_length: T.
        share: of the ordinary tokens, to predict.
        masked: share of the predicted tokens that are [MASK].
        replaced: share of them that are random ordinary ids.

    Raises:
        UserError: seq_length holds no pair, or a share is wrong.
    """

    ids: MaskIds
    seq_length: int
    share: float = 0.15
    masked: float = 0.8
    replaced: float = 0.1

    def __post_init__(self) -> None:
        if self.window < 2:
            raise UserError(
                f"model.seq_length={self.seq_length} is too short for a pair of sentences; use "
                f"{MARKS + 2} or more, for [CLS] A [SEP] B [SEP]"
            )
        check_window(self.window)
        if not 0 < self.share <= 1:
            raise UserError(f"share={self.share} of predicted tokens; use above 0, up to 1")
        if not (0 <= self.masked <= self.masked + self.replaced <= 1):
            raise UserError(
                f"masked={self.masked} and replaced={self.replaced} of the predicted tokens; use "
                "shares of 0 or more with a sum of at most 1"
            )

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self.ids.vocab_size

    @property
    def window(self) -> int:
        """W, tokens of the corpus in a sample."""
        return self.seq_length - MARKS

    def check(self, samples: Samples) -> None:
        """Raises UserError if an epoch has no other window to take B from."""
        if samples.windows_per_epoch < 2:
            raise UserError(
                f"{samples.num_tokens} tokens are one window of {self.window}, but half of the "
                "pairs take B from another one; use more data, another data.validation_fraction "
                "or a smaller model.seq_length"
            )

    def fields(self, samples: Samples, number_B: np.ndarray, *, seed: int) -> dict[str, np.ndarray]:
        """Sample numbers[B] -> the arrays of a batch, int32; see `Objective.fields`."""
        drawn = draw(seed, number_B, 2 + self.window + self._most)
        split_B = (1 + drawn[:, 0] % np.uint64(self.window - 1)).astype(np.int64)
        swapped_B = (drawn[:, 1] & np.uint64(1)).astype(bool)
        token_BW = samples.rows(number_B)[:, :-1].copy()
        other_B = _others(samples, number_B[swapped_B], drawn[swapped_B, 1] >> np.uint64(1))
        other_BW = samples.rows(other_B)[:, :-1]
        is_a = np.arange(self.window) < split_B[swapped_B, None]
        token_BW[swapped_B] = np.where(is_a, token_BW[swapped_B], other_BW)
        masked_BW, target_BW = self._mask(token_BW, drawn[:, 2:])
        return self._join(masked_BW, target_BW, split_B) | {
            "next_sentence": swapped_B.astype(np.int32)
        }

    def _mask(self, token_BW: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens -> the model's, and the targets, both `[B, W]`. drawn[B, W + K]."""
        is_special = np.isin(token_BW, self.ids.special)
        place_BK = shuffle(drawn[:, : self.window], is_special)[:, : self._most]
        ordinary_B = self.window - is_special.sum(axis=1)
        count_B = np.minimum(_rounded(self.share * ordinary_B), ordinary_B)
        row, rank = np.nonzero(np.arange(self._most) < count_B[:, None])
        at = row, place_BK[row, rank]
        masked_BW, target_BW = token_BW.copy(), np.full_like(token_BW, NOT_COUNTED)
        target_BW[at] = token_BW[at]
        masked_BW[at] = self._replace(token_BW[at], drawn[row, self.window + rank])
        return masked_BW, target_BW

    def _replace(self, tokens: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """Tokens to predict, `[n]` -> as the model sees them."""
        kind, number = np.divmod(drawn, np.uint64(BELOW))
        random = self._ordinary[number % np.uint64(len(self._ordinary))]
        ends = [round(end * BELOW) for end in (self.masked, self.masked + self.replaced)]
        seen = np.where(kind < ends[1], random, tokens)
        return np.where(kind < ends[0], np.int32(self.ids.mask), seen)

    def _join(
        self, masked_BW: np.ndarray, target_BW: np.ndarray, split_B: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Puts the marks between the parts, of which the first has split_B tokens."""
        place_T, split_B1 = np.arange(self.seq_length), split_B[:, None]
        is_mark = (place_T == split_B1 + 1) | (place_T == 0) | (place_T == self.seq_length - 1)
        tokens_BT = np.full(is_mark.shape, self.ids.sep, dtype=np.int32)
        tokens_BT[:, 0] = self.ids.cls
        targets_BT = np.full_like(tokens_BT, NOT_COUNTED)
        tokens_BT[~is_mark], targets_BT[~is_mark] = masked_BW.ravel(), target_BW.ravel()
        return {
            "tokens": tokens_BT,
            "token_types": (place_T > split_B1 + 1).astype(np.int32),
            "mask": np.ones_like(tokens_BT),
            "targets": targets_BT,
        }

    @property
    def _most(self) -> int:
        """K."""
        return int(_rounded(self.share * self.window))

    @functools.cached_property
    def _ordinary(self) -> np.ndarray:
        """The ids that are not special, in order."""
        return np.setdiff1d(np.arange(self.ids.vocab_size, dtype=np.int32), self.ids.special)


def _rounded(counts: np.ndarray | float) -> np.ndarray:
    """Whole numbers, 1 or more."""
    return np.maximum(1, np.rint(counts)).astype(np.int64)


def _others(samples: Samples, number_B: np.ndarray, drawn_B: np.ndarray) -> np.ndarray:
    """Sample numbers -> those of other samples of the same epoch, each as likely."""
    size = samples.windows_per_epoch
    epoch_B, place_B = np.divmod(number_B, size)
    step_B = 1 + (drawn_B % np.uint64(size - 1)).astype(np.int64)
    return epoch_B * size + (place_B + step_B) % size
