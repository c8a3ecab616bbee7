r"""Files of token ids, memory-mapped: nothing is read until a batch asks for it.

- **jaxptd's** `.bin`, by `jaxptd data`: 64 bytes, little-endian: magic `JAXPTDID`; version u32 = 1;
  bytes of an id u32, 2 or 4; number of ids u64; ids of the vocabulary u64; end of document u64;
  zeros. Then the ids.
- **llm.c's** `.bin` (dev/data/data_common.py): 256 int32, of which the first three are magic,
  version and number of ids; magic 20240520 with version 1 has uint16 ids, 20240801 with 7 uint32.
- **nanoGPT** `.bin` (data/openwebtext/prepare.py): little-endian uint16 ids, nothing else; each
  document is followed by its end of document. 32-bit ids without a header are recognized by their
  upper halves, which are always small: no text repeats one token at every second position.
- **Megatron** `.bin` + `.idx` (Megatron-LM core/datasets/indexed_dataset.py): the `.bin` is ids,
  nothing else. The `.idx`, little-endian: magic `MMIDIDX\0\0`; version u64 = 1; dtype code u8
  (1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16); number of sequences
  u64; length of the document index u64; each sequence's length int32; each sequence's byte offset
  in the `.bin` int64; the document index int64. The ids are read unchanged; let
  preprocess_data.py add the ends of documents (`--append-eod`).

A `.bin` with an `.idx` of the same name is Megatron's.
"""

import contextlib
import dataclasses
import errno
import os
import struct
import types
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxptd.atomic_files import explained, shown
from jaxptd.data.batches import Concatenated, Tokens
from jaxptd.data.records import check_signature
from jaxptd.data.stored_ids import Blocks, StoredIds
from jaxptd.errors import UserError
from jaxptd.stores import Place, read_range, size_of

NANOGPT_DTYPE = np.dtype("<u2")
NANOGPT_VOCAB_SIZE = 2**16

MAGIC, VERSION = b"JAXPTDID", 1
HEADER = struct.Struct("<8sIIQQQ24x")
DTYPES: Mapping[int, np.dtype] = types.MappingProxyType({2: NANOGPT_DTYPE, 4: np.dtype("<u4")})

LLM_C_HEADER, LLM_C_SIZE = struct.Struct("<iii"), 256 * 4
LLM_C_DTYPES = {(20240520, 1): DTYPES[2], (20240801, 7): DTYPES[4]}  # magic and version -> ids

TEXT, _LETTERS = 64, frozenset(b"\t\n\r") | frozenset(range(32, 127))  # least bytes; which

# How 32-bit ids are told from pairs of 16-bit ids.
SAMPLED = 2**14  # ids to look at in each of three places
FEWEST = 16  # pairs
ENOUGH = 32  # lower halves above SMALL, while no upper half is
SMALL = 2**5  # upper halves are below this: vocabularies of 2 M ids

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document index
MEGATRON_VERSION = 1
MEGATRON_DTYPES = {
    1: "<u1",
    2: "<i1",
    3: "<i2",
    4: "<i4",
    5: "<i8",
    8: "<u2",
}  # dtypes of ids, without the floats


def is_token_file(path: Place) -> bool:
    """True if the file holds ids (.bin) rather than text."""
    return path.suffix == ".bin"


def open_tokens(files: Sequence[Place]) -> Tokens:
    """Maps the ids of `.bin` files in order: a memmap, or `Concatenated` memmaps of several files.

    Raises:
        UserError: a file cannot be read or violates its format.
    """
    arrays = [open_token_file(path) for path in files]
    return arrays[0] if len(arrays) == 1 else Concatenated(tuple(arrays))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the ids of a file are.

    Args:
        dtype: of an id.
        offset: bytes before the first id.
        count: number of ids the file should have. None if the file does not say.
        vocab_size: of the tokenizer that made them, if the file says so.
        end_of_document: that tokenizer's end of document.
        guessed: whether the width of ids was only guessed from their pattern.
    """

    dtype: np.dtype
    offset: int = 0
    count: int | None = None
    vocab_size: int | None = None
    end_of_document: int | None = None
    guessed: bool = False


def open_token_file(path: Place) -> np.memmap | StoredIds:
    """Maps the ids of one `.bin` file, in Megatron's format if it has an `.idx`.

    Raises:
        UserError: the file cannot be read or violates its format.
    """
    try:
        layout = layout_of(path)
        size = _size(path) - layout.offset
        if size <= 0:
            raise UserError(f"data.source: {path} is empty; leave it out")
        itemsize = layout.dtype.itemsize
        if layout.count is not None and size != layout.count * itemsize:
            raise UserError(
                f"data.source: {path} has {size} bytes of ids, but its header says "
                f"{layout.count * itemsize}; it is truncated, make it again"
            )
        if size % itemsize:
            raise UserError(
                f"data.source: {path} has {size} bytes, not a multiple of {itemsize} "
                f"({layout.dtype.name} ids); it is truncated or not a token file, make it again"
            )
        return _ids(path, layout.dtype, layout.offset)
    except OSError as error:
        raise UserError(f"data.source: cannot read {path}: {error.strerror or error}") from error


def _size(path: Place) -> int:
    """Bytes of a file or an object. Raises OSError if there is none."""
    if isinstance(path, Path):
        return path.stat().st_size
    if (size := size_of(path)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return size


def _ids(path: Place, dtype: np.dtype, offset: int = 0) -> np.memmap | StoredIds:
    """The ids from a byte on, mapped or read from a store."""
    if isinstance(path, Path):
        return np.memmap(path, dtype=dtype, mode="r", offset=offset)
    size = _size(path)
    return StoredIds(Blocks(path, size), dtype, offset, (size - offset) // dtype.itemsize)


def layout_of(path: Place) -> Layout:
    """Finds where the ids of a `.bin` file are, from its index, its header, or its pattern.

    Raises:
        UserError: the index or the header is unknown.
        OSError: the file cannot be read.
    """
    index = path.with_suffix(".idx")
    if index.exists() if isinstance(index, Path) else size_of(index) is not None:
        return Layout(_read_megatron_dtype(index, path))
    start = read_range(path, 0, min(LLM_C_SIZE, _size(path)))
    check_signature(path, start, ids=True)
    if start.startswith(MAGIC):
        return _read_header(path, start)
    if len(start) == LLM_C_SIZE:
        magic, version, count = LLM_C_HEADER.unpack(start[: LLM_C_HEADER.size])
        if magic in {known for known, _ in LLM_C_DTYPES}:
            if (magic, version) not in LLM_C_DTYPES:
                raise UserError(f"data.source: {path} has llm.c's version {version}; make it again")
            return Layout(LLM_C_DTYPES[magic, version], LLM_C_SIZE, count)
    if len(start) >= TEXT and all(each in _LETTERS for each in start):
        raise UserError(
            f"data.source: {path} is text, but its name says token ids; rename it to .txt"
        )
    _check_order(path, start)
    wide = _has_wide_ids(path)
    return Layout(DTYPES[4] if wide else NANOGPT_DTYPE, guessed=wide)


def _check_order(path: Place, start: bytes) -> None:
    """Raises UserError for ids that look big-endian.

    Most ids of a text are below a few thousand, so that upper bytes are small and lower ones
    arbitrary.
    """
    if len(start) == LLM_C_SIZE:
        pairs = np.frombuffer(start, NANOGPT_DTYPE)
        low, high = (np.mean(x < 16) for x in (pairs & 0xFF, pairs >> 8))
        if low > 0.5 and high < 0.8 * low:
            raise UserError(
                f"data.source: {path} has no header, and its ids look big-endian (upper byte "
                "first); write little-endian ids, x.astype('<u2').tofile(...)"
            )


def _read_header(path: Place, start: bytes) -> Layout:
    if len(start) < HEADER.size:
        raise UserError(f"data.source: {path} ends within its header; make it again")
    _, version, itemsize, count, vocab_size, end = HEADER.unpack(start[: HEADER.size])
    if version != VERSION or itemsize not in DTYPES:
        raise UserError(
            f"data.source: {path} has version {version} with ids of {itemsize} bytes, this "
            f"jaxptd reads version {VERSION} with 2 or 4; make it again, or use a newer jaxptd"
        )
    return Layout(DTYPES[itemsize], HEADER.size, count, vocab_size, end)


def _has_wide_ids(path: Place) -> bool:
    """True for a file without a header whose ids look like 32 bits.

    Raises:
        UserError: they look like 64 bits.
    """
    size = _size(path)
    if size % 4 or size < 4 * FEWEST:
        return False
    pairs = _ids(path, DTYPES[4])
    starts = (0, (len(pairs) - SAMPLED) // 2, len(pairs) - SAMPLED)
    sample = np.concatenate([np.asarray(pairs[max(start, 0) :][:SAMPLED]) for start in starts])
    low, high = sample & 0xFFFF, sample >> 16
    if (high >= SMALL).any() or np.count_nonzero(low >= SMALL) < min(ENOUGH, len(sample) / 4):
        return False
    if len(pairs) % 2 == 0 and not np.asarray(pairs[: 6 * SAMPLED])[1::2].any():
        raise UserError(
            f"data.source: {path} has no header and its ids look like 64 bits (every second "
            "32-bit number is 0); write them as uint16 or uint32"
        )
    return True


def _read_megatron_dtype(index: Place, tokens: Place) -> np.dtype:
    """Reads the dtype of a `.bin` from its `.idx`, and checks that the two agree."""
    if isinstance(index, Path) and not index.is_file():
        raise UserError(f"data.source: {index} is not a regular file; remove it, or make it again")
    header = read_range(index, 0, min(MEGATRON_HEADER.size, _size(index)))
    if len(header) < MEGATRON_HEADER.size or not header.startswith(MEGATRON_MAGIC):
        raise UserError(
            f"data.source: {index} is not a Megatron index (no MMIDIDX at its start); make it again"
        )
    _, version, code, num_sequences, num_documents = MEGATRON_HEADER.unpack(header)
    if version != MEGATRON_VERSION:
        raise UserError(
            f"data.source: {index} has version {version}, not {MEGATRON_VERSION}; make it again"
        )
    if code not in MEGATRON_DTYPES:
        known = ", ".join(
            f"{known} {np.dtype(name).name}" for known, name in MEGATRON_DTYPES.items()
        )
        raise UserError(f"data.source: {index} has dtype code {code}; ids must have one of {known}")
    expected = MEGATRON_HEADER.size + num_sequences * (4 + 8) + num_documents * 8
    if (size := _size(index)) != expected:
        raise UserError(
            f"data.source: {index} has {size} bytes, {num_sequences} sequences and {num_documents} "
            f"document entries take {expected}; it is truncated or multimodal, make it again"
        )
    dtype = np.dtype(MEGATRON_DTYPES[code])
    _check_megatron_sequences(index, tokens, num_sequences=num_sequences, itemsize=dtype.itemsize)
    return dtype


def _check_megatron_sequences(
    index: Place, tokens: Place, *, num_sequences: int, itemsize: int
) -> None:
    """Checks that sequences are contiguous and fill the `.bin`, so that it is one array of ids."""
    start = MEGATRON_HEADER.size
    middle, end = start + 4 * num_sequences, start + 12 * num_sequences
    lengths = np.frombuffer(read_range(index, start, middle), "<i4").astype(np.int64)
    pointers = np.frombuffer(read_range(index, middle, end), "<i8")
    ends = np.cumsum(lengths) * itemsize
    if (lengths < 0).any() or not np.array_equal(pointers, ends - lengths * itemsize):
        raise UserError(f"data.source: {index}: its sequences are not contiguous; make it again")
    expected = int(ends[-1]) if num_sequences else 0
    if (size := _size(tokens)) != expected:
        raise UserError(
            f"data.source: {tokens} has {size} bytes, but {index} says {expected}; make both again"
        )


def write_bin(path: Path | str, tokens: np.ndarray) -> None:
    """Writes ids as a nanoGPT `.bin`: uint16, without a header.

    Raises:
        UserError: as `write_bin_arrays`.
    """
    _write_aside(Path(path), lambda file: _write_ids(file, [tokens], NANOGPT_DTYPE))


def write_bin_arrays(
    path: Path | str, arrays: Iterable[np.ndarray], *, vocab_size: int, end_of_document: int
) -> int:
    """Writes 1D arrays of ids in order as one jaxptd `.bin`. Returns the number of ids.

    A temporary file is renamed once complete, so that an error leaves an existing file unchanged.

    Args:
        path: the file.
        arrays: ids below vocab_size.
        vocab_size: the tokenizer's; ids have 16 bits up to 65,536, else 32.
        end_of_document: the id that ends documents.

    Raises:
        UserError: an id does not fit, there are none, or the file cannot be written.
    """
    dtype = DTYPES[2 if vocab_size <= NANOGPT_VOCAB_SIZE else 4]

    def write(file: Any) -> int:
        file.write(bytes(HEADER.size))
        count = _write_ids(file, arrays, dtype)
        file.seek(0)
        file.write(HEADER.pack(MAGIC, VERSION, dtype.itemsize, count, vocab_size, end_of_document))
        return count

    return _write_aside(Path(path), write)


def _write_aside(path: Path, write: Callable[[Any], int]) -> int:
    """Yields a temporary file to write, then moves it into place."""
    if not os.path.isdir(path.parent):
        folder = shown(path.parent)
        raise UserError(f"cannot write {shown(path)}: there is no folder {folder}; make it first")
    # Not the name with a suffix, which could exceed the file system's limit.
    short = zlib.crc32(path.name.encode(errors="surrogatepass"))
    partial = path.with_name(f".{short:08x}.{os.getpid()}.partial")
    remedy = "use a short name, in a writable folder with free space"
    try:
        with explained(f"cannot write {shown(path)}", remedy):
            _check_name(path)
            with open(partial, "wb") as file:
                count = write(file)
                file.flush()
                os.fsync(file.fileno())
            if not count:
                raise UserError(f"{shown(path)}: there are no tokens to write")
            os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return count


def _check_name(path: Path) -> None:
    """Raises OSError or ValueError for an impossible file name, before any work is done."""
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)


def _write_ids(file: Any, arrays: Iterable[np.ndarray], dtype: np.dtype) -> int:
    """Writes ids and returns their number. Raises UserError for one that does not fit."""
    limit = 2 ** (8 * dtype.itemsize)
    count = 0
    for tokens in arrays:
        wrong = tokens[(tokens < 0) | (tokens >= limit)]
        if len(wrong):
            raise UserError(
                f"id {wrong[0]} does not fit {8 * dtype.itemsize} bits (0 to {limit - 1}); "
                "use the vocabulary of the tokenizer that made it"
            )
        file.write(tokens.astype(dtype).tobytes())
        count += len(tokens)
    return count
