"""The sequences of a step, as a function of the seed and the sample number only.

Sample number = step * global_batch_size + row in the batch. No process, device or earlier call
changes a sample, so each process reads its own rows only, and a resumed run continues with the
next sample.

N tokens in the corpus, T = seq_length; a sequence is T + 1 tokens, for T predictions.

A file may change while a run reads it. Reading a mapping of a truncated file ends the process with
SIGBUS and no message, so the size is checked before each read.
"""

import abc
import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxptd.data.stored_ids import StoredIds
from jaxptd.errors import UserError

# ---- several token arrays read as one, without copies --------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Concatenated:
    """A sequence of 1D arrays, memmaps or `StoredIds`.

    Slices are views; `np.asarray` reads and copies.
    """

    arrays: tuple[np.ndarray | StoredIds, ...]

    def __len__(self) -> int:
        return sum(len(array) for array in self.arrays)

    def __getitem__(self, index: slice) -> "Concatenated":
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise IndexError("only slices of step 1")
        views: list[np.ndarray | StoredIds] = []
        first = 0
        for array in self.arrays:
            low, high = max(start - first, 0), min(stop - first, len(array))
            views += [array[low:high]] if low < high else []
            first += len(array)
        return Concatenated(tuple(views))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("concatenated arrays cannot be read without a copy")
        arrays = [np.asarray(each) for each in self.arrays]
        array = np.concatenate(arrays) if arrays else np.empty(0, np.uint16)
        return array.astype(dtype or array.dtype, copy=False)


Tokens = np.ndarray | Concatenated | StoredIds


def fetch(tokens: Tokens, ranges: Sequence[tuple[int, int]]) -> None:
    """Fetches what some ranges of tokens need from a store, several blocks at a time."""
    if isinstance(tokens, StoredIds):
        tokens.fetch(ranges)
    elif isinstance(tokens, Concatenated):
        first = 0
        for array in tokens.arrays:
            fetch(array, [(a - first, b - first) for a, b in ranges])
            first += len(array)


def locate(tokens: Tokens, index: int) -> str:
    """Describes the position of token `index` in its file, or in an array, for a message."""
    if isinstance(tokens, Concatenated):
        for array in tokens.arrays:
            if index < len(array):
                return locate(array, index)
            index -= len(array)
        raise IndexError("beyond the last token")
    if isinstance(tokens, StoredIds):
        return f"token {tokens.skipped + index} of {tokens.blocks.url}"
    if not isinstance(tokens, np.memmap):
        return f"token {index} of the data"
    skipped = (_address(tokens) - _address(whole(tokens))) // tokens.itemsize
    return f"token {skipped + index} of {tokens.filename}"


def whole(tokens: np.memmap) -> np.memmap:
    """The mapping of a whole file that a slice was taken from."""
    while isinstance(tokens.base, np.memmap):
        tokens = tokens.base
    return tokens


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class MappedFiles:
    """The files that an array of tokens maps, as they were when this object was made.

    A deleted or replaced file is no error, because its mapping keeps the ids.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._found = {id(each): _stat(each) for each in _maps(tokens)}

    def check(self, tokens: Tokens) -> None:
        """Raises UserError if a file that these tokens map, a part of all, has changed."""
        for each in _maps(tokens):
            if _changed(each, self._found[id(each)]):
                raise UserError(
                    f"data.source: {each.filename} was changed while the run read it; put the "
                    "file back as it was, and start the run again"
                )


def _maps(tokens: Tokens) -> list[np.memmap]:
    """The mappings of whole files that an array is part of."""
    arrays = tokens.arrays if isinstance(tokens, Concatenated) else (tokens,)
    return [whole(array) for array in arrays if isinstance(array, np.memmap)]


def _changed(mapped: np.memmap, before: os.stat_result | None) -> bool:
    """True if a file is shorter than its mapping, or was written to."""
    try:
        if mapped._mmap.size() < mapped.nbytes:  # type: ignore[attr-defined]
            return True
    except OSError:  # deleted on another host of a network file system
        return True
    now = _stat(mapped)
    if now is None or before is None or not os.path.samestat(now, before):
        return False
    return (now.st_mtime_ns, now.st_size) != (before.st_mtime_ns, before.st_size)


def _stat(mapped: np.memmap) -> os.stat_result | None:
    """The state of the file now at a mapping's path, perhaps another file; None without one."""
    with contextlib.suppress(OSError):
        return os.stat(str(mapped.filename))
    return None


# ---- the sequences of training or validation, by number ------------------------------------------

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

    def documents(self, indices: np.ndarray, end_of_document: int) -> np.ndarray:
        """Sample numbers[n] -> the document of each of T tokens, from 0 in its row, int32[n, T].

        Below 0 for padding. `end_of_document`: the id that ends a document.

        Raises:
            UserError: as `rows`.
        """
        return number_documents(self.rows(indices)[:, :-1], end_of_document)

    @abc.abstractmethod
    def first_tokens(self, count: int) -> np.ndarray:
        """The first tokens of the corpus, unchecked, `[count]`."""


# ---- whether data are the same as before ---------------------------------------------------------
# A resumed run continues with the data it began with. Each source is identified by its number of
# tokens and a digest of some of them: files may be moved, copied or split, but not grown, replaced
# or read with another tokenizer.

PLACES, EACH = 16, 4096  # a digest reads 4096 tokens at 16 evenly spaced places

VALIDATION = "data.validation"  # with a dot, before the name of an evaluated set
# Name of each source of a mixture, else "", and of each evaluated set -> its tokens and digest.
# Hosts may have other names.
Identity = Mapping[str, Mapping[str, Any]]


def identity_of(
    tokens: Tokens, ends: np.ndarray | None = None, counted: np.ndarray | None = None
) -> dict[str, Any]:
    """The number of a source's tokens, and a digest of some of them.

    Args:
        tokens: of the source.
        ends: the token behind each document, if the ids do not show it; in the digest, all of it.
        counted: whether each token is a target, if the template of chats says so; the same.
    """
    count = len(tokens)
    digest = hashlib.sha256()
    for start in np.linspace(0, max(count - EACH, 0), PLACES).astype(np.int64).tolist():
        digest.update(np.asarray(tokens[start : start + EACH]).astype("<u4").tobytes())
    if ends is not None:
        digest.update(ends.astype("<i8").tobytes())
    if counted is not None:
        digest.update(np.packbits(counted).tobytes())
    return {"tokens": count, "digest": digest.hexdigest()[:16]}


def change(now: Identity, before: Identity) -> str | None:
    """Says what has changed in the data, of the first source that differs; None for nothing."""
    if len(now) != len(before):
        return f"data.source has {len(now)} sources, not {len(before)}"
    for name, current, previous in zip(now, now.values(), before.values(), strict=True):
        source = f"data.source {name}" if name else "data.source"
        source = name if name.startswith(f"{VALIDATION}.") else source
        if current == previous:
            continue
        if current["tokens"] == previous["tokens"]:
            return (
                f"{source} has other tokens now (the text, tokenizer or chat template has changed) "
                "than"
            )
        return f"{source} has {current['tokens']:,} tokens now, and had {previous['tokens']:,}"
    return None


# ---- token ids that the model's vocabulary does not have -----------------------------------------

SCANNED = 2**26  # tokens checked before a run begins: a tenth of a second from memory
BLOCK = 2**20  # tokens at a time


def check_ids(tokens: Tokens, start: int, *, end: int, vocab_size: int) -> None:
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


def scan_ids(tokens: Tokens, vocab_size: int) -> None:
    """Raises as `check_ids` for any of the tokens, or of many if there are very many.

    So a tokenizer that is not the model's is found at once, before the run writes a file.
    """
    for start in _starts(len(tokens)):
        check_ids(tokens, start, end=start + BLOCK, vocab_size=vocab_size)


def _starts(count: int) -> Iterable[int]:
    """First tokens of the blocks to scan: all blocks, or `SCANNED` tokens' worth, evenly spaced."""
    if count <= SCANNED:
        return range(0, count, BLOCK)
    return np.linspace(0, count - BLOCK, SCANNED // BLOCK).astype(np.int64).tolist()


# ---- windows of a corpus -------------------------------------------------------------------------


class Reader:
    """Reads tokens of a corpus and checks them.

    Args:
        tokens: ids[N], an array, a memmap or `Concatenated` memmaps.
        vocab_size: ids are in [0, vocab_size).
    """

    def __init__(self, tokens: Tokens, vocab_size: int) -> None:
        self.tokens, self.vocab_size = tokens, vocab_size
        self._files = MappedFiles(tokens)

    def read(self, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
        """The ids of some ranges, one after another, int32.

        Raises:
            UserError: an id is outside the vocabulary, or a file was changed since this object was
                made; names the file.
        """
        if not isinstance(self.tokens, np.ndarray):
            fetch(self.tokens, ranges)
        ids, first = np.empty(sum(end - start for start, end in ranges), dtype=np.int64), 0
        for start, end in ranges:
            part = self.tokens[start:end]
            self._files.check(part)
            ids[first : first + end - start] = np.asarray(part)
            first += end - start
        if ((ids < 0) | (ids >= self.vocab_size)).any():
            for start, end in ranges:
                check_ids(self.tokens, start, end=end, vocab_size=self.vocab_size)
        return ids.astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Windows(Samples):
    """Sequences of one corpus. Subclasses say in which order.

    Args:
        tokens: ids[N], an array, a memmap or `Concatenated` memmaps.
        seq_length: T.
        vocab_size: ids are in [0, vocab_size).
        counted: bool[N], False for tokens that are no targets; None counts all.
        ends: the token behind each document, int64, ascending; None: behind each end of document.

    Raises:
        UserError: the corpus is shorter than one sequence, or no token is counted.
    """

    tokens: Tokens
    seq_length: int
    vocab_size: int
    counted: np.ndarray | None = dataclasses.field(default=None, kw_only=True)
    ends: np.ndarray | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.counted is not None and not self.counted[1:].any():
            raise UserError(
                f"data.source: all of {len(self.tokens)} tokens are of prompts, none of an "
                "answer; use more data, or another data.validation_fraction"
            )
        if len(self.tokens) < self.seq_length + 1:
            raise UserError(
                f"the corpus has {len(self.tokens)} tokens, one sequence takes "
                f"{self.seq_length + 1}; use more data or a smaller model.seq_length"
            )
        _ = self._reader  # files as they are now

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @abc.abstractmethod
    def starts(self, indices: np.ndarray) -> np.ndarray:
        """Sample numbers[n] -> index of each sample's first token[n], both int64."""

    def rows(self, indices: np.ndarray) -> np.ndarray:
        starts, length = self.starts(np.asarray(indices, dtype=np.int64)), self.seq_length + 1
        ids = self._reader.read([(start, start + length) for start in starts.tolist()])
        return ids.reshape(-1, length)

    def targets(self, indices: np.ndarray) -> np.ndarray:
        targets = self.rows(indices)[:, 1:]
        if self.counted is None:
            return targets
        counted = self.counted[self._places(indices) + 1]
        return np.where(counted, targets, np.int32(NOT_COUNTED))

    def documents(self, indices: np.ndarray, end_of_document: int) -> np.ndarray:
        if self.ends is None:
            return super().documents(indices, end_of_document)
        document_BT = np.searchsorted(self.ends, self._places(indices), side="right")
        return (document_BT - document_BT[:, :1]).astype(np.int32)

    def _places(self, indices: np.ndarray) -> np.ndarray:
        """Sample numbers[n] -> the index of each of T tokens in the corpus, int64[n, T]."""
        starts = self.starts(np.asarray(indices, dtype=np.int64))
        return starts[:, None] + np.arange(self.seq_length)

    def first_tokens(self, count: int) -> np.ndarray:
        return np.asarray(self.tokens[:count])

    @functools.cached_property
    def _reader(self) -> Reader:
        return Reader(self.tokens, self.vocab_size)


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


def document_starts(segment_BT: np.ndarray) -> np.ndarray:
    """The document of each token -> the position of its document's first token, int64[B, T]."""
    begins_BT = np.ones(segment_BT.shape, bool)
    begins_BT[:, 1:] = segment_BT[:, 1:] != segment_BT[:, :-1]
    position_T = np.arange(segment_BT.shape[1])
    starts: np.ndarray = np.maximum.accumulate(np.where(begins_BT, position_T, 0), axis=1)
    return starts


def _draw_epoch(seed: int, epoch: int, num_windows: int) -> tuple[int, np.ndarray]:
    """Draws a random number for the shift, and order[num_windows], as a pure function.

    Philox is counter-based, with (seed, epoch) as its key. Its raw output never changes, whereas
    numpy may change `Generator.permutation` (NEP 19), and with it a resumed run's data.
    """
    drawn = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(
        num_windows + 1
    )
    order = np.argsort(drawn[1:], kind="stable")
    order.setflags(write=False)  # the cache shares it among callers
    return int(drawn[0]), order


# ---- the arrays of a batch -----------------------------------------------------------------------


class Derived(NamedTuple):
    """The rule for a field that is computed from others, and that users do not give.

    Args:
        fields: the others; none: the numbers of its samples in the global batch.
        make: their rows in text order, `[n, T]` each, or these numbers `[n]` -> those of this
            field.
    """

    fields: tuple[str, ...]
    make: Callable[..., np.ndarray]


class Field(NamedTuple):
    """An array of a batch: `[B, T, *others]`, or `[B]`; each process reads its own part of it.

    Args:
        length: the field of `ModelConfig` that is T; None: a number a sample.
        lowest: the lowest value; None: any.
        end: values are below it; None: any.
        derived: from other fields; None: it is given.
        others: the fields of `ModelConfig` that are the sizes of the other dims.
        dtype: int32, float32 or float64.
        ring: T is in the order of the ring's devices; else as a user gives it.
    """

    length: str | None
    lowest: int | None = None
    end: int | None = None
    derived: Derived | None = None
    others: tuple[str, ...] = ()
    dtype: Literal["int32", "float32", "float64"] = "int32"
    ring: bool = True

    @property
    def sizes(self) -> tuple[str, ...]:
        """The fields of `ModelConfig` that are the sizes of all dims behind B."""
        return self.others if self.length is None else (self.length, *self.others)

    def padded(self, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        """x with padding after each sequence, and after the last one, up to these sizes.

        Padding is the lowest value, or one below 0 if values have no lower bound: so it is no
        target, is masked out, and belongs to no document. Float fields are padded with zeros.
        """
        lowest = NOT_COUNTED if self.lowest is None else self.lowest
        missing = [(0, size - have) for size, have in zip(sizes, x.shape, strict=True)]
        return np.pad(x, missing, constant_values=lowest if self.dtype == "int32" else 0)

    def dims(self) -> str:
        """The dims in words, as `[B, T]`."""
        sizes = ["T" if self.ring else size for size in self.sizes]
        return f"[{', '.join(['B', *sizes])}]"
