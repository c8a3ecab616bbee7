"""`Samples`: the sequences of training or validation, by their numbers."""

import abc

import numpy as np

NOT_COUNTED = -1  # as a target: left out of the loss


class Samples(abc.ABC):
    """Sequences of T = seq_length tokens and the one after them, by sample number.

    A sample is a function of its number alone. No process, device or earlier call changes it.
    """

    seq_length: int

    @property
    @abc.abstractmethod
    def num_tokens(self) -> int:
        """Tokens of all sources."""

    @property
    def amount(self) -> str:
        """The size of all sources, and of a sample, in words."""
        tokens = f"{self.num_tokens / 1e6:.2f} M training tokens"
        return f"{tokens} in sequences of {self.seq_length}"

    @property
    @abc.abstractmethod
    def windows_per_epoch(self) -> int:
        """Samples before any is read again."""

    @abc.abstractmethod
    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Sample numbers[n], 0 or more, in any order -> their sequences, int32[n, T + 1].

        Raises:
            UserError: an id is outside the vocabulary, or a file was changed since this object was
                made; names the file.
        """

    @abc.abstractmethod
    def targets(self, indices: np.ndarray) -> np.ndarray:
        """Sample numbers[n] -> the token after each of T tokens, int32[n, T]; -1 is not counted.

        Raises:
            UserError: as `rows`.
        """

    @abc.abstractmethod
    def first_tokens(self, count: int) -> np.ndarray:
        """The first tokens of the corpus, unchecked, `[count]`."""
