r"""A file with one process's shards of a state, in canonical form, and the reading of any of them.

    jaxptd shards 1 <CRC-32 of the header> <its length>\n    the first `PROLOGUE` bytes
    header, JSON       what the file belongs to, the tensors of the state, the pieces in this file
    data               one piece after another: a contiguous block of a tensor, C order

A file is written under a hidden name and moved into place, so it is complete or ignored. Every
piece has a CRC-32, which `Shards` checks. Pieces are blocks of whole tensors with their extents, so
any layout can put its own blocks together from the files of all processes.
"""

import dataclasses
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from jaxptd.checkpoint.blocks import Block, Extent, copy_common, extent_of, meet, shape_of
from jaxptd.checkpoint.folders import DamagedCheckpointError, reason

Read = Callable[[int, int], bytes]  # reads some bytes of a file: offset, size

MAGIC = b"jaxptd shards 1 "
PROLOGUE = len(MAGIC) + 8 + 1 + 12 + 1  # bytes: CRC-32 in hex, space, length, newline
MOST = 2**30  # bytes of a header


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of a tensor in a file.

    Args:
        name: of the tensor.
        extent: of the block in the tensor.
        offset: of its first byte from the first byte of data.
        size: bytes.
        crc32: of these bytes.
    """

    name: str
    extent: Extent
    offset: int
    size: int
    crc32: int


# ---- writing -------------------------------------------------------------------------------------


def write(path: Path, about: Mapping[str, Any], blocks: Sequence[Block]) -> None:
    """Writes a file of blocks under a hidden name and moves it into place. Raises OSError.

    Args:
        path: of the file.
        about: JSON values for the header.
        blocks: of this process.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("wb") as file:
            views = [_bytes_of(block) for _, _, block in blocks]
            pieces, offset = [], 0
            for (name, extent, _), view in zip(blocks, views, strict=True):
                pieces.append(Piece(name, extent, offset, view.nbytes, zlib.crc32(view)))
                offset += view.nbytes
            header = json.dumps({**about, "pieces": [dataclasses.astuple(x) for x in pieces]})
            file.write(_prologue(header.encode()) + header.encode())
            for view in views:
                file.write(view)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _bytes_of(block: np.ndarray) -> memoryview:
    """The bytes of an array in C order, copied only if they are in another."""
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data


def _prologue(header: bytes) -> bytes:
    return MAGIC + f"{zlib.crc32(header):08x} {len(header):012d}\n".encode()


# ---- reading -------------------------------------------------------------------------------------


class Shards:
    """The header of a file, and its pieces, read when they are asked for.

    Args:
        copies: ways to read bytes of the file, each of one of its copies; they raise OSError.
        where: its path, for messages.

    Raises:
        DamagedCheckpointError: no copy has the header as it was written.
    """

    def __init__(self, copies: Sequence[Read], where: str) -> None:
        self._copies, self._where = copies, where
        header = self._first_good(_header, "its header was changed")
        self._data = PROLOGUE + len(header)
        try:
            self.about: dict[str, Any] = json.loads(header)
            pieces = self.about.pop("pieces")
            self.pieces = [
                Piece(name, tuple((start, stop) for start, stop in extent), *rest)
                for name, extent, *rest in pieces
            ]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._damaged("its header is not one of this library") from error

    def piece(self, piece: Piece) -> bytes:
        """The bytes of a piece. Raises DamagedCheckpointError if no copy has them as written."""

        def good(read: Read) -> bytes | None:
            data = read(self._data + piece.offset, piece.size)
            return data if zlib.crc32(data) == piece.crc32 else None

        return self._first_good(good, f"a block of {piece.name} was changed (its CRC-32 differs)")

    def _first_good(self, get: Callable[[Read], bytes | None], cause: str) -> bytes:
        """Gets something from the first undamaged copy."""
        for read in self._copies:
            try:
                if (found := get(read)) is not None:
                    return found
            except OSError as error:
                cause = reason(error)
        raise self._damaged(cause)

    def _damaged(self, cause: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self._where} is damaged: {cause}")


def _header(read: Read) -> bytes | None:
    """The header of a copy; None if it is damaged."""
    prologue = read(0, PROLOGUE)
    length = prologue[-13:-1]
    header = read(PROLOGUE, int(length)) if length.isdigit() and int(length) <= MOST else b""
    return header if prologue == _prologue(header) else None


def reader(path: Path) -> Read:
    """Reads bytes of a file on this host."""

    def read(offset: int, size: int) -> bytes:
        with path.open("rb") as file:
            return read_range(file, offset, size)

    return read


def read_range(file: BinaryIO, offset: int, size: int) -> bytes:
    """Reads bytes of an open file, fewer at its end."""
    file.seek(offset)
    return file.read(size)


class Assembly:
    """Puts blocks of tensors together from the files of all processes.

    Args:
        files: one for each process that wrote the state.
        where: names the state, for messages.
    """

    def __init__(self, files: Sequence[Shards], where: str) -> None:
        self._where = where
        self._pieces: dict[str, list[tuple[Shards, Piece]]] = {}
        for file in files:
            for piece in file.pieces:
                self._pieces.setdefault(piece.name, []).append((file, piece))

    def array(self, name: str, wanted: Any) -> jax.Array:
        """A tensor with the shape, dtype and sharding of `wanted`, a jax.ShapeDtypeStruct.

        Raises:
            DamagedCheckpointError: a piece is damaged, or a part of the tensor is in no file.
        """
        blocks: dict[Extent, np.ndarray] = {}

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            extent = extent_of(index or (), wanted.shape)
            if extent not in blocks:
                blocks[extent] = self._block(name, extent, jnp.dtype(wanted.dtype))
            return blocks[extent]

        return jax.make_array_from_callback(wanted.shape, wanted.sharding, block, wanted.dtype)

    def _block(self, name: str, extent: Extent, dtype: np.dtype) -> np.ndarray:
        """One block of a tensor, from the pieces that overlap it."""
        block = np.empty(shape_of(extent), dtype)
        found = 0
        for file, piece in self._pieces.get(name, ()):
            if meet(extent, piece.extent):  # only then it is read
                source = np.frombuffer(file.piece(piece), dtype).reshape(shape_of(piece.extent))
                found += copy_common(block, extent, source, piece.extent)
        if found != block.size:
            raise DamagedCheckpointError(f"{self._where} is damaged: a part of {name} is missing")
        return block
