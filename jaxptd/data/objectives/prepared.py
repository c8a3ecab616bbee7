"""`Prepared`: samples whose fields an objective makes, from numbers drawn for each sample."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jaxptd.data.batches import Samples
from jaxptd.data.tokenizers import Tokenizer
from jaxptd.errors import UserError

# ---- random numbers of samples -------------------------------------------------------------------

# Each sample has its own range of the counter of one Philox stream, so that consecutive samples
# take one call. Philox's raw output never changes (numpy enhancement proposal 19).

# Letters: B samples, N numbers of each.

OF_OBJECTIVES = (
    2**63 + 2**62
)  # Philox is also keyed with epochs and mixtures, which have smaller numbers
STEP = 4  # numbers that Philox makes for one count
LONGEST = 2**20  # places that can be shuffled
PLACES = np.uint64(LONGEST - 1)  # low bits of a key, which have its place


def check_window(window: int) -> None:
    """Raises UserError for more tokens of a sample than can be shuffled."""
    if window > LONGEST:
        raise UserError(
            f"model.seq_length makes samples of {window} tokens, but at most {LONGEST} can be "
            "shuffled; use a smaller one"
        )


def draw(seed: int, number_B: np.ndarray, count: int) -> np.ndarray:
    """Draws `count` numbers of 64 bits for each sample, uint64[B, count]."""
    key = np.array([seed, OF_OBJECTIVES], dtype=np.uint64)
    steps = -(-count // STEP)
    drawn = np.empty((len(number_B), STEP * steps), dtype=np.uint64)
    breaks = np.flatnonzero(np.diff(number_B) != 1) + 1
    for run in np.split(np.arange(len(number_B)), breaks) if len(number_B) else ():
        philox = np.random.Philox(key=key, counter=int(number_B[run[0]]) * steps)
        drawn[run[0] : run[-1] + 1] = philox.random_raw(run.size * STEP * steps).reshape(
            run.size, -1
        )
    return drawn[:, :count]


def shuffle(drawn_BN: np.ndarray, last_BN: np.ndarray | None = None) -> np.ndarray:
    """Numbers -> the places 0 to N - 1 of each row in random order, int64[B, N].

    The upper 44 bits of a number decide; equal ones are in the order of their places.

    Args:
        drawn_BN: from `draw`; N up to LONGEST.
        last_BN: True for places that come after all others.
    """
    keys_BN = drawn_BN if last_BN is None else np.where(last_BN, ~np.uint64(0), drawn_BN)
    places_N = np.arange(drawn_BN.shape[1], dtype=np.uint64)
    return (np.sort(keys_BN & ~PLACES | places_N, axis=1) & PLACES).astype(np.int64)


# ---- special tokens, by the names that tokenizers have for them ----------------------------------

MASK_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
SPAN_PAD = "<pad>"
SENTINELS = 100  # of T5's vocabulary
# In the order of their ids: the sentinel of the first span has the last.
SPAN_TOKENS = (SPAN_PAD, *(f"<extra_id_{span}>" for span in reversed(range(SENTINELS))))


@dataclasses.dataclass(frozen=True)
class MaskIds:
    """Ids of masked language modelling.

    Args:
        pad: fills up a sequence.
        cls: begins a sequence.
        sep: ends each of its two parts.
        mask: replaces a masked token.
        end_of_document: of the corpus; like the other four it is never masked.
        vocab_size: ids are in [0, vocab_size).
    """

    pad: int
    cls: int
    sep: int
    mask: int
    end_of_document: int
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "MaskIds":
        """Finds the ids of a tokenizer.

        Raises:
            UserError: it does not have all four tokens.
        """
        pad, cls_, sep, mask = _find(tokenizer, MASK_TOKENS, "masked language modelling")
        end, size = tokenizer.end_of_document, tokenizer.vocab_size
        return cls(pad=pad, cls=cls_, sep=sep, mask=mask, end_of_document=end, vocab_size=size)

    @property
    def special(self) -> tuple[int, ...]:
        """All special ids."""
        return (self.pad, self.cls, self.sep, self.mask, self.end_of_document)


@dataclasses.dataclass(frozen=True)
class SpanIds:
    """Ids of span corruption.

    Args:
        pad: fills up a sequence; the decoder's first input.
        end: the last token of source and of targets.
        sentinels: of the first span, the second and so on.
        vocab_size: ids are in [0, vocab_size).
    """

    pad: int
    end: int
    sentinels: tuple[int, ...]
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "SpanIds":
        """Finds the ids of a tokenizer; its end of document ends sequences.

        Raises:
            UserError: it does not have the tokens.
        """
        (pad, _) = _find(tokenizer, (SPAN_PAD, "<extra_id_0>"), "span corruption")
        sentinels = tuple(_sentinels(tokenizer))
        return cls(pad, tokenizer.end_of_document, sentinels, tokenizer.vocab_size)


def _find(tokenizer: Tokenizer, names: Sequence[str], objective: str) -> tuple[int, ...]:
    ids = {name: tokenizer.token_id(name) for name in names}
    if missing := [name for name, token_id in ids.items() if token_id is None]:
        raise UserError(
            f"data.tokenizer has no token {' and no '.join(missing)}, which {objective} needs; "
            "add them to its file, or use bytes"
        )
    return tuple(token_id for token_id in ids.values() if token_id is not None)


def _sentinels(tokenizer: Tokenizer) -> Iterator[int]:
    """The ids of <extra_id_0>, <extra_id_1>, ..., as many as there are."""
    span = 0
    while (number := tokenizer.token_id(f"<extra_id_{span}>")) is not None:
        yield number
        span += 1


RECALLED = (
    16  # recent reads to remember: a batch is read field by field, for the rows of each device
)


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
        fields = self.objective.fields(self.samples, number_B, seed=self.seed)
        for array in fields.values():
            array.setflags(write=False)  # callers share it
        return fields
