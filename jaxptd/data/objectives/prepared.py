"""`Prepared`: samples whose fields an objective makes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from jaxptd.data.samples import Samples

RECALLED = 16  # reads; a batch is read field by field, for the rows of each device


@runtime_checkable
class Objective(Protocol):
    """Makes the fields of a batch from windows of the corpus."""

    @property
    def vocab_size(self) -> int:
        """Ids of its fields are in [0, vocab_size)."""

    @property
    def window(self) -> int:
        """Tokens of the corpus in a sample."""

    def check(self, samples: Samples) -> None:
        """Raises UserError if these samples, of `window` tokens and one more, do not suffice."""

    def fields(
        self, samples: Samples, number_B: np.ndarray, *, seed: int
    ) -> Mapping[str, np.ndarray]:
        """Sample numbers[B], int64, in any order -> the arrays of a batch by name, int32[B, ...].

        A row is a function of (seed, its number).

        Raises:
            UserError: as `Samples.rows`.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared(Samples):
    """Samples of an objective; `rows` and `targets` are still those of the corpus.

    Args:
        samples: windows of `objective.window` tokens of the corpus, and one more.
        objective: makes the fields.
        seed: of its draws, 0 or more.

    Raises:
        UserError: the samples do not suffice for the objective.
    """

    samples: Samples
    objective: Objective
    seed: int

    def __post_init__(self) -> None:
        self.objective.check(self.samples)

    @property
    def seq_length(self) -> int:  # type: ignore[override]
        """Tokens of the corpus in a sample."""
        return self.samples.seq_length

    @property
    def num_tokens(self) -> int:
        return self.samples.num_tokens

    @property
    def windows_per_epoch(self) -> int:
        return self.samples.windows_per_epoch

    def rows(self, indices: np.ndarray) -> np.ndarray:
        return self.samples.rows(indices)

    def targets(self, indices: np.ndarray) -> np.ndarray:
        return self.samples.targets(indices)

    def first_tokens(self, count: int) -> np.ndarray:
        return self.samples.first_tokens(count)

    def field(self, name: str, indices: np.ndarray) -> np.ndarray:
        """A field of samples by their numbers[B], int32[B, ...], read-only.

        The fields of the same samples are made together and recalled.

        Raises:
            UserError: as `Samples.rows`.
        """
        return self._fields(np.asarray(indices, dtype=np.int64).tobytes())[name]

    @functools.cached_property
    def _fields(self) -> Callable[[bytes], Mapping[str, np.ndarray]]:
        return functools.lru_cache(maxsize=RECALLED)(self._make)

    def _make(self, indices: bytes) -> Mapping[str, np.ndarray]:
        number_B = np.frombuffer(indices, dtype=np.int64)
        found = self.objective.fields(self.samples, number_B, seed=self.seed)
        for array in found.values():
            array.setflags(write=False)  # callers share it
        return found
