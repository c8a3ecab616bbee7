"""Span corruption, T5's objective.

Spans with 15 % of a window's tokens, 3 per span on average, are cut out. The source has a sentinel
in place of each span; the targets have the sentinels, each followed by the tokens of its span. Both
end with the end of document. The window is as long as source and targets allow; as in T5's code
all lengths follow from it and are the same for every sample:

    source   kept tokens, sentinel 0, kept tokens, sentinel 1, ..., sentinel P - 1, end
    targets  sentinel 0, span 0, sentinel 1, span 1, ..., span P - 1, end

Letters: B samples, S = seq_length, T = decoder_seq_length, W tokens of a window, P spans.
Source: Raffel et al., arXiv 1910.10683, section 3.1.4; `random_spans_helper` and
`random_spans_noise_mask` of its code, t5/data/preprocessors.py.
"""

import bisect
import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from jaxptd.data.batches import NOT_COUNTED, Samples
from jaxptd.data.objectives.prepared import SpanIds, check_window, draw, shuffle
from jaxptd.errors import UserError

SHORTEST = 3  # a token or a span of one, its sentinel, the end


class Lengths(NamedTuple):
    """Counts the tokens of a window that stay, and those that are cut out in spans."""

    kept: int
    cut: int
    spans: int

    @property
    def source(self) -> int:
        """With sentinels and the end."""
        return self.kept + self.spans + 1

    @property
    def targets(self) -> int:
        """With sentinels and the end."""
        return self.cut + self.spans + 1


@dataclasses.dataclass(frozen=True)
class SpanCorruption:
    """Makes `source` and `source_mask`, `[B, S]`, and `targets`, `[B, T]`.

    source_mask is 1 for tokens and 0 for padding; targets are -1 after their end.

    Args:
        ids: of the special tokens.
        seq_length: S.
        decoder_seq_length: T.
        share: of the tokens, to cut out.
        mean_span: tokens of a span.

    Raises:
        UserError: a length is too short or needs too many sentinels, or a share or span is wrong.
    """

    ids: SpanIds
    seq_length: int
    decoder_seq_length: int
    share: float = 0.15
    mean_span: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UserError(f"share={self.share} of tokens to cut out; use one between 0 and 1")
        if not 1 <= self.mean_span < float("inf"):
            raise UserError(f"mean_span={self.mean_span} tokens; use 1 or more")
        lengths = {"seq_length": self.seq_length}
        lengths["encoder_decoder.seq_length"] = self.decoder_seq_length
        for name, length in lengths.items():
            if length < SHORTEST:
                raise UserError(
                    f"model.{name}={length} holds no token, sentinel and end; use {SHORTEST} or "
                    "more"
                )
        check_window(self.window)
        if self.lengths.spans > len(self.ids.sentinels):
            raise UserError(
                f"model.seq_length={self.seq_length} has {self.lengths.spans} spans, but "
                f"data.tokenizer has {len(self.ids.sentinels)} sentinels; use a smaller one"
            )

    @functools.cached_property
    def lengths(self) -> Lengths:
        """The lengths of the longest window whose source and targets fit."""
        longest = self.seq_length + self.decoder_seq_length
        too_long = bisect.bisect_left(range(longest), True, lo=2, key=self._is_too_long)
        return self._lengths_of(too_long - 1)

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self.ids.vocab_size

    @property
    def window(self) -> int:
        """W, tokens of the corpus in a sample."""
        return self.lengths.kept + self.lengths.cut

    def check(self, samples: Samples) -> None:
        """Raises nothing: one window suffices."""

    def fields(self, samples: Samples, number_B: np.ndarray, *, seed: int) -> dict[str, np.ndarray]:
        """Sample numbers[B] -> the arrays of a batch, int32; see `Objective.fields`."""
        kept, cut, spans = self.lengths
        drawn = draw(seed, number_B, kept + cut)
        kept_BP, cut_BP = _ends(drawn[:, :kept], spans), _ends(drawn[:, kept:], spans)
        first_BP = np.pad(cut_BP, ((0, 0), (1, 0)))[:, :-1]
        token_BW = samples.rows(number_B)[:, :-1]
        is_cut = _inside(kept_BP + first_BP, kept_BP + cut_BP, window=kept + cut)
        source, targets = token_BW[~is_cut].reshape(-1, kept), token_BW[is_cut].reshape(-1, cut)
        length, end = self.seq_length, self.decoder_seq_length
        return {
            "source": self._mark(source, kept_BP, length=length, fill=self.ids.pad),
            "source_mask": self._source_mask(len(number_B)),
            "targets": self._mark(targets, first_BP, length=end, fill=NOT_COUNTED),
        }

    def _mark(
        self, token_BN: np.ndarray, before_BP: np.ndarray, *, length: int, fill: int
    ) -> np.ndarray:
        """Inserts sentinels after this many tokens, adds the end, and pads: `[B, length]`."""
        (batch, count), spans = token_BN.shape, before_BP.shape[1]
        place_BP = before_BP + np.arange(spans)
        is_text = np.ones((batch, count + spans), dtype=bool)
        np.put_along_axis(is_text, place_BP, False, axis=1)
        marked = np.full((batch, length), fill, dtype=np.int32)
        marked[:, : count + spans][is_text] = token_BN.ravel()
        np.put_along_axis(
            marked, place_BP, np.array([self.ids.sentinels[:spans]], np.int32), axis=1
        )
        marked[:, count + spans] = self.ids.end
        return marked

    def _source_mask(self, batch: int) -> np.ndarray:
        mask_S = (np.arange(self.seq_length) < self.lengths.source).astype(np.int32)
        return np.tile(mask_S, (batch, 1))

    def _lengths_of(self, window: int) -> Lengths:
        """T5's rule: at least one token of each kind, in each span and before each span."""
        cut = min(max(round(window * self.share), 1), window - 1)
        spans = min(max(round(cut / self.mean_span), 1), window - cut)
        return Lengths(window - cut, cut, spans)

    def _is_too_long(self, window: int) -> bool:
        lengths = self._lengths_of(window)
        return lengths.source > self.seq_length or lengths.targets > self.decoder_seq_length


def _ends(drawn_BN: np.ndarray, pieces: int) -> np.ndarray:
    """Cuts N items into nonempty pieces, uniformly at random -> their ends, `[B, pieces]`."""
    cuts = np.sort(shuffle(drawn_BN[:, 1:])[:, : pieces - 1], axis=1) + 1
    return np.pad(cuts, ((0, 0), (0, 1)), constant_values=drawn_BN.shape[1])


def _inside(start_BP: np.ndarray, end_BP: np.ndarray, *, window: int) -> np.ndarray:
    """Consecutive ranges of W places -> True for the places in them, `[B, W]`."""
    steps = np.zeros((len(end_BP), window + 1), dtype=np.int8)
    np.put_along_axis(steps, start_BP, 1, axis=1)
    np.put_along_axis(steps, end_BP, -1, axis=1)
    return np.cumsum(steps, axis=1, dtype=np.int8)[:, :-1].astype(bool)
