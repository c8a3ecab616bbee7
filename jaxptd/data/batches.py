"""The sequences of a step, as a function of the seed and the sample number only.

Sample number = step * global_batch_size + row in the batch. No process, device or earlier call
changes a sample, so each process reads its own rows only, and a resumed run continues with the
next sample.

N tokens in the corpus, T = seq_length; a sequence is T + 1 tokens, for T predictions.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from functools import partial

import numpy as np

from jaxptd.data.mapped import NOT_COUNTED, Concatenated, MappedFiles, Samples, check_ids
from jaxptd.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Windows(Samples):
    """Sequences of one corpus. Subclasses say in which order.

    Args:
        tokens: ids[N], an array, a memmap or `Concatenated` memmaps.
        seq_length: T.
        vocab_size: ids are in [0, vocab_size).
        counted: bool[N], False for tokens that are no targets; None counts all.

    Raises:
        UserError: the corpus is shorter than one sequence, or no token is counted.
    """

    tokens: np.ndarray | Concatenated
    seq_length: int
    vocab_size: int
    counted: np.ndarray | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.counted is not None and not self.counted[1:].any():
            raise UserError(
                f"data.prompt_field: all of {len(self.tokens)} tokens are of prompts, none of an "
                "answer; use more data, or another data.validation_fraction"
            )
        if len(self.tokens) < self.seq_length + 1:
            raise UserError(
                f"the corpus has {len(self.tokens)} tokens, one sequence takes "
                f"{self.seq_length + 1}; use more data or a smaller model.seq_length"
            )
        _ = self._files  # as they are now

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @abc.abstractmethod
    def starts(self, indices: np.ndarray) -> np.ndarray:
        """Sample numbers[n] -> index of each sample's first token[n], both int64."""

    def rows(self, indices: np.ndarray) -> np.ndarray:
        indices = np.asarray(indices, dtype=np.int64)
        starts, length = self.starts(indices).tolist(), self.seq_length + 1
        rows = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(rows, starts, strict=True):
            window = self.tokens[start : start + length]
            self._files.check(window)
            row[:] = np.asarray(window)
        if ((rows < 0) | (rows >= self.vocab_size)).any():
            for start in starts:
                check_ids(self.tokens, start, end=start + length, vocab_size=self.vocab_size)
        return rows.astype(np.int32)

    def targets(self, indices: np.ndarray) -> np.ndarray:
        targets = self.rows(indices)[:, 1:]
        if self.counted is None:
            return targets
        starts = self.starts(np.asarray(indices, dtype=np.int64))
        counted = self.counted[starts[:, None] + np.arange(1, self.seq_length + 1)]
        return np.where(counted, targets, np.int32(NOT_COUNTED))

    def first_tokens(self, count: int) -> np.ndarray:
        return np.asarray(self.tokens[:count])

    @functools.cached_property
    def _files(self) -> MappedFiles:
        return MappedFiles(self.tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class ShuffledWindows(Windows):
    """Sequences in random order.

    Epoch e is samples [e * W, (e + 1) * W): the W windows that start at shift + T * k, each once.
    Order and shift are drawn for (seed, e). The shift moves the windows' boundaries from epoch to
    epoch. An epoch leaves out fewer than 2 T tokens, at the two ends, different ones each time.

    Args:
        tokens: ids[N], see `Windows`.
        seq_length: T.
        vocab_size: ids are in [0, vocab_size).
        seed: seed of order and shifts, 0 or more.
    """

    seed: int

    @property
    def windows_per_epoch(self) -> int:
        """W: one window fewer than fit, to leave room for the shift."""
        return max(1, len(self.tokens) // self.seq_length - 1)

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """Sample numbers[n] -> index of each sample's first token[n], both int64."""
        # Shifts 0 to room - 1 fit: a window ends one token beyond the next window's start.
        room = len(self.tokens) - self.windows_per_epoch * self.seq_length
        epochs, places = np.divmod(indices, self.windows_per_epoch)
        starts = np.empty_like(indices)
        for epoch in np.unique(epochs):
            drawn, order = self._epoch(int(epoch))
            inside = epochs == epoch
            starts[inside] = drawn % room + self.seq_length * order[places[inside]]
        return starts

    @functools.cached_property
    def _epoch(self) -> Callable[[int], tuple[int, np.ndarray]]:
        """Draws an epoch, or recalls it: 10 million windows take a second.

        A batch spans one or two epochs. Each source of a mixture recalls its own.
        """
        draw = partial(_draw_epoch, self.seed, num_windows=self.windows_per_epoch)
        return functools.lru_cache(maxsize=2)(draw)


class WindowsInOrder(Windows):
    """Sequences in the order of the corpus, for evaluation: no shuffle, no shift, no seed.

    The first window follows the last, so every evaluation reads the same tokens.
    """

    @property
    def windows_per_epoch(self) -> int:
        """W: as many as fit."""
        return (len(self.tokens) - 1) // self.seq_length

    def starts(self, indices: np.ndarray) -> np.ndarray:
        return indices % self.windows_per_epoch * self.seq_length


def number_documents(rows: np.ndarray, end_of_document: int) -> np.ndarray:
    """ids[n, T] -> each token's document, numbered from 0 in its row, int32[n, T].

    The end-of-document token belongs to the document that it ends.
    """
    ends = rows == end_of_document
    return (np.cumsum(ends, axis=1) - ends).astype(np.int32)


def _draw_epoch(seed: int, epoch: int, num_windows: int) -> tuple[int, np.ndarray]:
    """Draws a random number for the shift, and order[num_windows], as a pure function.

    Philox is counter-based: (seed, epoch) is its key. Its raw output never changes, while numpy may
    change `Generator.permutation` (NEP 19), which would change a resumed run's data.
    """
    drawn = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(
        num_windows + 1
    )
    order = np.argsort(drawn[1:], kind="stable")
    order.setflags(write=False)  # the cache shares it among callers
    return int(drawn[0]), order
