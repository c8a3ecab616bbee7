"""Whole records packed into sequences by best fit: `data.documents=whole`.

A record of n tokens is n - 1 predictions, so it takes n - 1 places of a sequence: its last token is
only a target. Longest first, each record goes into the sequence with the least room that still
holds it (best fit decreasing). What this decides depends on lengths alone, so it is decided once,
for *slots*: slot s is for a record of the s-th largest length. Each epoch draws which of the
records of a length takes which of its slots, and the order of the sequences. An epoch thus has the
same number of sequences each time, with other records together.

Records of the same length are packed at once, so the work is O(n log n) in numpy to sort n records,
and a Python step for each length and each amount of room that its records meet.

Letters: B samples, T = seq_length, R records, W sequences of an epoch, K records of some samples.
Source: Johnson, Near-optimal bin packing algorithms, 1973 (best fit decreasing); Krell et al.,
arXiv 2107.02027 (packing a histogram of lengths).
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxptd.data.batches import NOT_COUNTED, Reader, Samples, Tokens
from jaxptd.errors import UserError

PADDING = 0  # as a token
NO_RECORD = -1  # the document of padding, which no token sees
LONGEST = 2**20  # places of a sequence: the upper 21 bits of a key sort lengths
DRAWN = 43  # lower bits of a key, which are drawn


# ---- which lengths share a sequence --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """The sequences that records of some lengths fill.

    Args:
        tokens: of each record, integers[R].
        seq_length: T.

    Raises:
        UserError: a record is longer than a sequence, or none has two tokens.
    """

    tokens: np.ndarray
    seq_length: int

    def __post_init__(self) -> None:
        if self.seq_length > LONGEST:
            raise UserError(
                f"model.seq_length={self.seq_length}: data.documents=whole packs sequences of at "
                f"most {LONGEST} tokens; use documents=apart"
            )
        require_fit(self.tokens, self.seq_length)
        if not (self.tokens > 1).any():
            raise UserError(
                "data.documents=whole: no record has two tokens, one to predict the other from; "
                "use more data"
            )

    @property
    def places(self) -> np.ndarray:
        """Predictions of each record, int32[R]. One without any takes no slot."""
        return np.maximum(self.tokens, 1).astype(np.int32) - 1

    @functools.cached_property
    def _slots(self) -> tuple[np.ndarray, np.ndarray]:
        """The slots of all sequences, one after another, int32[slots]; where each begins[W + 1]."""
        bin_S = best_fit(np.bincount(self.places), self.seq_length)
        begins = np.cumsum(np.bincount(bin_S, minlength=1), dtype=np.int64)
        return np.argsort(bin_S, kind="stable").astype(np.int32), np.pad(begins, (1, 0))

    @property
    def slots(self) -> np.ndarray:
        """The slots of all sequences, one sequence after another, int32."""
        return self._slots[0]

    @property
    def begins(self) -> np.ndarray:
        """Where in `slots` each sequence begins, and the end, int64[W + 1]."""
        return self._slots[1]

    @property
    def sequences(self) -> int:
        """W."""
        return len(self.begins) - 1

    def padding(self, sequences: int) -> float:
        """The share of places that hold no record if it takes this many sequences."""
        return 1 - int(self.places.sum(dtype=np.int64)) / (sequences * self.seq_length)

    @property
    def summary(self) -> str:
        """Says how much is padding, and how much other ways to make sequences pad or cut."""
        records, ends = len(self.slots), np.cumsum(self.tokens, dtype=np.int64)
        first, last = (ends - self.tokens) // self.seq_length, (ends - 1) // self.seq_length
        left_out = len(self.tokens) - records
        return (
            f"{records:,} whole records in {self.sequences:,} sequences of {self.seq_length}: "
            f"{self.padding(self.sequences):.2%} padding (one record per sequence: "
            f"{self.padding(records):.2%}; documents=apart: none, but it cuts "
            f"{(first != last).mean():.2%} of the records)"
            f"{f'; {left_out:,} of one token are left out' * bool(left_out)}"
        )


OTHERWISE = "data.too_long=cut or drop, or documents=apart, which splits records"


def require_fit(tokens: np.ndarray, seq_length: int, otherwise: str = OTHERWISE) -> None:
    """Raises UserError for a record that a sequence does not hold.

    Args:
        tokens: of each record.
        seq_length: T.
        otherwise: what else helps than a longer sequence.
    """
    too_long = np.flatnonzero(tokens > seq_length + 1)
    if len(too_long):
        longest = int(tokens.max())
        many = f"{len(too_long):,} of {len(tokens):,} records are" if len(too_long) > 1 else "it is"
        raise UserError(
            f"data.documents=whole: record {int(too_long[0]) + 1} has "
            f"{int(tokens[too_long[0]]):,} tokens, and a sequence holds {seq_length + 1:,}; {many} "
            f"too long, so use model.seq_length={longest - 1} or more, {otherwise}"
        )


def best_fit(number_of: np.ndarray, room: int) -> np.ndarray:
    """Packs items, longest first, each into the bin with the least room that holds it.

    Items of the same length go into bins with the same room at once: as many into each bin as it
    holds, because after the first it is the one with the least room.

    Args:
        number_of: items of each length, int[L]; those of length 0 are left out.
        room: of a bin, L - 1 or more.

    Returns:
        the bin of each item, longest first, int32[items].
    """
    bin_S = np.empty(int(number_of[1:].sum()), np.int32)
    runs: dict[int, list[tuple[int, int]]] = {}  # room -> first bin and number of bins
    rooms: list[int] = []  # the keys, ascending
    packed = bins = 0

    def keep(space: int, first: int, size: int) -> None:
        if not space or not size:
            return
        if space not in runs:
            bisect.insort(rooms, space)
        runs.setdefault(space, []).append((first, size))

    for length in np.flatnonzero(number_of)[::-1].tolist():
        left = int(number_of[length]) if length else 0
        while left:
            place = bisect.bisect_left(rooms, length)
            if place < len(rooms):
                space = rooms[place]
                first, size = runs[space].pop()
                if not runs[space]:
                    del runs[space], rooms[place]
            else:
                first, size, space = bins, -(-left // (room // length)), room
                bins += size
            each = space // length
            full = min(left // each, size)
            rest = left - full * each if full < size else 0
            items = full * each + rest
            bin_S[packed : packed + items] = first + np.arange(items) // each
            packed, left = packed + items, left - items
            keep(space - each * length, first, full)
            keep(space - rest * length, first + full, min(rest, 1))
            begun = full + min(rest, 1)
            keep(space, first + begun, size - begun)
    return bin_S


def lengths_of(ends: np.ndarray) -> np.ndarray:
    """The token behind each record -> the tokens of each, int32[R]."""
    return np.diff(ends, prepend=0).astype(np.int32)


# ---- the sequences of an epoch -------------------------------------------------------------------


class Members(NamedTuple):
    """The records of some samples, K in all.

    record_K: their numbers. row_K: the sample of each. column_K: its first place there. nth_K: its
    number in its sample. place_K: the predictions of each.
    """

    record_K: np.ndarray
    row_K: np.ndarray
    column_K: np.ndarray
    nth_K: np.ndarray
    place_K: np.ndarray

    def spread(self, x_K: np.ndarray) -> np.ndarray:
        """A number of each record -> of each of its places, one record after another."""
        return np.repeat(x_K, self.place_K)

    @property
    def within(self) -> np.ndarray:
        """The number of each place in its record."""
        return np.arange(self.place_K.sum()) - self.spread(np.cumsum(self.place_K) - self.place_K)


@dataclasses.dataclass(frozen=True, eq=False)
class WholeRecords(Samples):
    """Sequences of whole records and padding.

    Args:
        tokens: ids[N].
        ends: the token behind each record, int64[R], ascending; the last is N.
        seq_length: T.
        vocab_size: ids are in [0, vocab_size).
        seed: of records and order, 0 or more, other ones in each epoch; None, for evaluation: the
            same ones in each.
        counted: bool[N], False for tokens that are no targets; None counts all.

    Raises:
        UserError: a record is longer than a sequence, or none has two tokens.
    """

    tokens: Tokens
    ends: np.ndarray
    seq_length: int
    vocab_size: int
    seed: int | None = None
    counted: np.ndarray | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _ = self._reader  # files as they are now
        _ = self.packing.sequences

    @functools.cached_property
    def packing(self) -> Packing:
        """Which lengths share a sequence."""
        return Packing(lengths_of(self.ends), self.seq_length)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def windows_per_epoch(self) -> int:
        return self.packing.sequences

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Adds padding after the last place; see `Samples.rows`."""
        found = self._members(indices)
        rows = self._filled(found, indices, self._ids(found, 0), fill=PADDING)
        return np.pad(rows, ((0, 0), (0, 1)), constant_values=PADDING)

    def targets(self, indices: np.ndarray) -> np.ndarray:
        found = self._members(indices)
        targets = self._ids(found, 1)
        if self.counted is not None:
            target_of = found.spread(self._starts(found.record_K)) + found.within + 1
            targets = np.where(self.counted[target_of], targets, NOT_COUNTED)
        return self._filled(found, indices, targets, fill=NOT_COUNTED)

    def documents(self, indices: np.ndarray, end_of_document: int) -> np.ndarray:
        found = self._members(indices)
        return self._filled(found, indices, found.spread(found.nth_K), fill=NO_RECORD)

    def records(self, index: int) -> np.ndarray:
        """The numbers of the records of a sample, in the order of their places."""
        return self._members(np.array([index])).record_K

    def first_tokens(self, count: int) -> np.ndarray:
        return np.asarray(self.tokens[:count])

    def _members(self, indices: np.ndarray) -> Members:
        epochs, numbers = np.divmod(np.asarray(indices, np.int64), self.windows_per_epoch)
        begins, every = self.packing.begins, [np.empty(0, np.int32)]
        for epoch, number in zip(epochs.tolist(), numbers.tolist(), strict=True):
            order, record_S = self._epoch(0 if self.seed is None else epoch)
            every.append(record_S[begins[order[number]] : begins[order[number] + 1]])
        record_K, sizes = np.concatenate(every), [len(each) for each in every[1:]]
        row_K = np.repeat(np.arange(len(sizes)), sizes)
        place_K = self.packing.tokens[record_K].astype(np.int64) - 1
        first_K = np.repeat(np.cumsum([0, *sizes])[:-1], sizes)  # of all, of its sample
        before_K = np.cumsum(place_K) - place_K
        nth_K = np.arange(len(record_K)) - first_K
        return Members(record_K, row_K, before_K - before_K[first_K], nth_K, place_K)

    def _starts(self, record_K: np.ndarray) -> np.ndarray:
        return self.ends[record_K] - self.packing.tokens[record_K]

    def _ids(self, found: Members, shift: int) -> np.ndarray:
        """The token at each place of some records, or `shift` later, int32."""
        starts = self._starts(found.record_K)
        ranges = zip(starts.tolist(), (starts + found.place_K + 1).tolist(), strict=True)
        ids = self._reader.read(list(ranges))  # each record has a token more than places
        nth = found.spread(np.arange(len(starts)))
        return ids[np.arange(len(nth)) + nth + shift]

    def _filled(
        self, found: Members, indices: np.ndarray, values: np.ndarray, *, fill: int
    ) -> np.ndarray:
        """A number of each place of some records -> int32[B, T], with `fill` where none is."""
        filled = np.full((len(indices), self.seq_length), fill, np.int32)
        filled[found.spread(found.row_K), found.spread(found.column_K) + found.within] = values
        return filled

    @functools.cached_property
    def _epoch(self) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
        """Draws an epoch, or recalls it. A batch spans one or two."""
        draw = partial(draw_epoch, self.packing, self.seed or 0)
        return functools.lru_cache(maxsize=2)(draw)

    @functools.cached_property
    def _reader(self) -> Reader:
        return Reader(self.tokens, self.vocab_size)


def draw_epoch(packing: Packing, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws the order of the sequences, int32[W], and the record in each of `slots`, int32.

    A pure function, from the raw output of Philox with (seed, epoch) as its key.
    """
    philox = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    order = np.argsort(philox.random_raw(packing.sequences), kind="stable").astype(np.int32)
    key_R = philox.random_raw(len(packing.tokens)) >> np.uint64(64 - DRAWN)
    key_R |= (packing.seq_length - packing.places).astype(np.uint64) << np.uint64(DRAWN)
    record_S = np.argsort(key_R, kind="stable").astype(np.int32)[packing.slots]
    for each in (order, record_S):
        each.setflags(write=False)  # the cache shares them among callers
    return order, record_S


def about_packing(sources: Mapping[str, Samples]) -> Iterator[str]:
    """Says how much is padding, for each source of whole records; its name is empty if alone."""
    for name, samples in sources.items():
        if isinstance(samples, WholeRecords):
            yield f"{f'{name}: ' * bool(name)}{samples.packing.summary}"
