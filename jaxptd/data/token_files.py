r"""Files of token ids, memory-mapped: nothing is read until a batch asks for it.

- **nanoGPT** `.bin` (data/openwebtext/prepare.py): little-endian uint16 ids, nothing else; each
  document is followed by its end of document.
- **Megatron** `.bin` + `.idx` (Megatron-LM core/datasets/indexed_dataset.py): the `.bin` is ids,
  nothing else. The `.idx`, little-endian: magic `MMIDIDX\0\0`; version u64 = 1; dtype code u8
  (1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16); number of sequences
  u64; length of the document index u64; each sequence's length int32; each sequence's byte offset
  in the `.bin` int64; the document index int64. The ids are read unchanged; let
  preprocess_data.py add the ends of documents (`--append-eod`).

A `.bin` with an `.idx` beside it is Megatron's, any other nanoGPT's.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from jaxptd.atomic_files import explained, shown
from jaxptd.data.concatenated import Concatenated
from jaxptd.errors import UserError

NANOGPT_DTYPE = np.dtype("<u2")
NANOGPT_VOCAB_SIZE = 2**16

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document index
MEGATRON_VERSION = 1
MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # ids: no floats


def is_token_file(path: Path) -> bool:
    """True if the file holds ids (.bin) rather than text."""
    return path.suffix == ".bin"


def open_tokens(files: Sequence[Path]) -> np.ndarray | Concatenated:
    """Maps the ids of `.bin` files, in their order: a memmap, or `Concatenated` memmaps of several.

    Raises:
        UserError: a file cannot be read, or breaks its format.
    """
    arrays = [open_token_file(path) for path in files]
    return arrays[0] if len(arrays) == 1 else Concatenated(tuple(arrays))


def open_token_file(path: Path) -> np.memmap:
    """Maps the ids of one `.bin` file, in Megatron's format if an `.idx` is beside it.

    Raises:
        UserError: the file cannot be read, or breaks its format.
    """
    index = path.with_suffix(".idx")
    try:
        dtype = _read_megatron_dtype(index, path) if index.exists() else NANOGPT_DTYPE
        size = path.stat().st_size
        if size == 0:
            raise UserError(f"data.source: {path} is empty; leave it out")
        if size % dtype.itemsize:
            raise UserError(
                f"data.source: {path} has {size} bytes, not a multiple of {dtype.itemsize} "
                f"({dtype.name} ids); it is truncated or is no token file, make it again"
            )
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise UserError(f"data.source: cannot read {path}: {error.strerror or error}") from error


def _read_megatron_dtype(index: Path, tokens: Path) -> np.dtype:
    """Reads the dtype of a `.bin` from its `.idx`, and checks that the two agree."""
    if not index.is_file():
        raise UserError(f"data.source: {index} is not a regular file; remove it, or make it again")
    with open(index, "rb") as file:
        header = file.read(MEGATRON_HEADER.size)
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
        raise UserError(f"data.source: {index} has dtype code {code}; ids are one of {known}")
    expected = MEGATRON_HEADER.size + num_sequences * (4 + 8) + num_documents * 8
    if (size := index.stat().st_size) != expected:
        raise UserError(
            f"data.source: {index} has {size} bytes, {num_sequences} sequences and {num_documents} "
            f"document entries take {expected}; it is truncated or multimodal, make it again"
        )
    dtype = np.dtype(MEGATRON_DTYPES[code])
    _check_megatron_sequences(index, tokens, num_sequences=num_sequences, itemsize=dtype.itemsize)
    return dtype


def _check_megatron_sequences(
    index: Path, tokens: Path, *, num_sequences: int, itemsize: int
) -> None:
    """Checks that sequences are contiguous and fill the `.bin`, so that it is one array of ids."""
    start = MEGATRON_HEADER.size
    lengths = np.fromfile(index, "<i4", num_sequences, offset=start).astype(np.int64)
    pointers = np.fromfile(index, "<i8", num_sequences, offset=start + 4 * num_sequences)
    ends = np.cumsum(lengths) * itemsize
    if (lengths < 0).any() or not np.array_equal(pointers, ends - lengths * itemsize):
        raise UserError(f"data.source: {index}: its sequences are not contiguous; make it again")
    expected = int(ends[-1]) if num_sequences else 0
    if (size := tokens.stat().st_size) != expected:
        raise UserError(
            f"data.source: {tokens} has {size} bytes, {index} says {expected}; make both again"
        )


def write_bin(path: Path | str, tokens: np.ndarray) -> None:
    """Writes ids as a nanoGPT `.bin`.

    Raises:
        UserError: as `write_bin_arrays`.
    """
    write_bin_arrays(path, [tokens])


def write_bin_arrays(path: Path | str, arrays: Iterable[np.ndarray]) -> int:
    """Writes 1D arrays of ids, in their order, as one nanoGPT `.bin`. Returns the number of ids.

    A temporary file is renamed when it is complete: an error leaves an existing file unchanged.

    Raises:
        UserError: an id is outside [0, 65536), there are none, or the file cannot be written.
    """
    path = Path(path)
    if not os.path.isdir(path.parent):
        folder = shown(path.parent)
        raise UserError(f"cannot write {shown(path)}: there is no folder {folder}; make it first")
    # Not with the name itself: one that the file system takes could be too long then.
    short = zlib.crc32(path.name.encode(errors="surrogatepass"))
    partial = path.with_name(f".{short:08x}.{os.getpid()}.partial")
    remedy = "use a short name, in a folder that can be written and has room"
    try:
        with explained(f"cannot write {shown(path)}", remedy):
            _check_name(path)
            count = _write(partial, arrays)
            if not count:
                raise UserError(f"{shown(path)}: there are no tokens to write")
            os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return count


def _check_name(path: Path) -> None:
    """Raises OSError or ValueError for a name that no file can have, before any work is done."""
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)


def _write(path: Path, arrays: Iterable[np.ndarray]) -> int:
    with open(path, "wb") as file:
        size = sum(file.write(_as_nanogpt(array).tobytes()) for array in arrays)
        file.flush()
        os.fsync(file.fileno())
    return size // NANOGPT_DTYPE.itemsize


def _as_nanogpt(tokens: np.ndarray) -> np.ndarray:
    wrong = tokens[(tokens < 0) | (tokens >= NANOGPT_VOCAB_SIZE)]
    if len(wrong):
        raise UserError(
            f"id {wrong[0]} does not fit a nanoGPT .bin (0 to {NANOGPT_VOCAB_SIZE - 1}); "
            "use a smaller vocabulary"
        )
    return tokens.astype(NANOGPT_DTYPE)
