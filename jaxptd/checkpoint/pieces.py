"""Arrays of a checkpoint in an object store: each process writes the shards on its devices.

    arrays/ATTEMPT/process_0.0.bin   pieces of arrays, one after the other
    arrays/ATTEMPT/process_0.json    where they are: a row for each piece

Orbax renames folders and merges the files of all processes, which needs a file system that all of
them see. Here no process reads what another wrote. Replicas are written once, so that the objects
hold as many bytes as the state. A restore reads the pieces that its own devices need.
"""

import dataclasses
import itertools
import json
import math
import re
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxptd import stores
from jaxptd.checkpoint.arrays import Background
from jaxptd.checkpoint.blocks import (
    Block,
    Extent,
    copy_common,
    extent_of,
    meet,
    own_blocks,
    shape_of,
)
from jaxptd.checkpoint.folders import CheckpointError, DamagedCheckpointError, reason
from jaxptd.stores import Place, StorePath

LARGEST = 2**25  # bytes of a piece; objects end with the first piece beyond it
SPAN = 2**26  # bytes that one request reads at most
GROUP = 2**30  # bytes of pieces that are in memory at a time, besides the arrays
INDEX = re.compile(r"arrays/[0-9a-f]+/process_[0-9]+\.json")  # its name in a checkpoint


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of an array, stored in row-major order.

    Args:
        tensor: name of the array.
        extent: of the block in the array.
        file: the object's name in the checkpoint.
        offset: byte in the object where it begins.
        crc32: of its bytes.
    """

    tensor: str
    extent: Extent
    file: str
    offset: int
    crc32: int


# ---- writing -------------------------------------------------------------------------------------


class PendingUpload:
    """Writes this process's shards in the background; the caller may change or donate them at once.

    Accelerators copy them to the host first. On the CPU the views that are kept make a step that
    donates a buffer write into another one.

    Args:
        folder: the checkpoint.
        attempt: a word that no other save has used.
        tensors: arrays by name.
    """

    def __init__(self, folder: StorePath, attempt: str, tensors: dict[str, jax.Array]) -> None:
        self._folder, self._prefix = folder, f"arrays/{attempt}/process_{jax.process_index()}"
        self._blocks = list(_packed(_small_blocks(tensors)))
        self._stopped = threading.Event()
        self._files: dict[str, dict[str, int]] = {}
        self._writing = Background(self._write)

    def wait_written(self) -> dict[str, dict[str, int]]:
        """Waits for the objects; size and CRC-32 of each. Raises the first failure."""
        self._writing.wait()
        return self._files

    def abort(self) -> None:
        """Returns once nothing is being written any more."""
        self._stopped.set()
        try:
            self._writing.wait()
        except Exception:
            return

    def _write(self) -> None:
        written = self._folder.store.each(self._write_object, range(len(self._blocks)))
        rows = [dataclasses.astuple(piece) for pieces in written for piece in pieces]
        self._put(f"{self._prefix}.json", json.dumps(rows).encode())

    def _write_object(self, number: int) -> list[Piece]:
        if self._stopped.is_set():
            raise CheckpointError("aborted")
        pieces, parts, offset = [], [], 0
        for name, extent, block in self._blocks[number]:
            data = block.reshape(-1).view(np.uint8).tobytes()
            file = f"{self._prefix}.{number}.bin"
            pieces.append(Piece(name, extent, file, offset, zlib.crc32(data)))
            parts.append(data)
            offset += len(data)
        self._put(f"{self._prefix}.{number}.bin", b"".join(parts))
        return pieces

    def _put(self, name: str, data: bytes) -> None:
        self._folder.store.write((self._folder / name).key, data)
        self._files[name] = {"size": len(data), "crc32": zlib.crc32(data)}


def _small_blocks(tensors: dict[str, jax.Array]) -> Iterator[Block]:
    """This process's blocks, in contiguous parts of at most `LARGEST` bytes."""
    for name, extent, x in own_blocks(tensors):
        for start, part in _rows(x):
            begin = [first + n for (first, _), n in zip(extent, start, strict=True)]
            ends = map(sum, zip(begin, part.shape, strict=True))
            yield Block(name, tuple(zip(begin, ends, strict=True)), part)


def _rows(x: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Contiguous blocks of at most `LARGEST` bytes, and the index of the first element of each."""
    if x.nbytes <= LARGEST:
        yield (0,) * x.ndim, x
        return
    dim, row = 0, x.nbytes // x.shape[0]
    while row > LARGEST:  # the first dim whose entries are small enough
        dim += 1
        row //= x.shape[dim]
    count = LARGEST // row
    for outer in itertools.product(*map(range, x.shape[:dim])):
        for first in range(0, x.shape[dim], count):
            here: Any = (*outer, slice(first, first + count))
            block = x[here]
            start = (*outer, first, *(0,) * (x.ndim - dim - 1))
            yield start, block.reshape((1,) * dim + block.shape)


def _packed(blocks: Iterator[Block]) -> Iterator[list[Block]]:
    """Blocks in groups, one for each object."""
    group, size = list[Block](), 0
    for block in blocks:
        group.append(block)
        size += block.data.nbytes
        if size >= LARGEST:
            yield group
            group, size = [], 0
    if group:
        yield group


# ---- reading -------------------------------------------------------------------------------------


def index_files(files: dict[str, Any]) -> list[str]:
    """The indexes among the files of a checkpoint; none in one that orbax wrote."""
    return [name for name in files if INDEX.fullmatch(name)]


def load(folder: Place, manifest: dict[str, Any], wanted: dict[str, Any]) -> dict[str, jax.Array]:
    """Reads arrays, each process the pieces that its devices need, each piece once.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        wanted: shape, dtype and sharding (None: the first device) by name.

    Raises:
        DamagedCheckpointError: an object is missing or was changed.
        CheckpointError: JAX does not have the dtype.
    """
    pieces = _read_indexes(folder, manifest)
    arrays: dict[str, jax.Array] = {}
    for names in _grouped(wanted):
        parts = {name: _parts_of(wanted[name]) for name in names}
        buffers = {
            name: {extent: np.empty(shape_of(extent), wanted[name].dtype) for extent in x}
            for name, x in parts.items()
        }
        filled = _fill(folder, [p for name in names for p in pieces.get(name, ())], buffers)
        for name in names:
            x, short = wanted[name], sum(b.size for b in buffers[name].values()) - filled[name]
            if short:
                raise _damaged(folder, f"{short} elements of {name} are in none of its files")
            arrays[name] = _placed(x, parts[name], buffers.pop(name))
            if arrays[name].dtype != x.dtype:
                raise CheckpointError(
                    f"checkpoint {folder}: {name} is {x.dtype}, jax made it {arrays[name].dtype}; "
                    'call jax.config.update("jax_enable_x64", True)'
                )
    return arrays


def _grouped(wanted: dict[str, Any]) -> Iterator[list[str]]:
    group, size = list[str](), 0
    for name, x in wanted.items():
        group.append(name)
        size += math.prod(x.shape) * np.dtype(x.dtype).itemsize
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _parts_of(x: Any) -> dict[Extent, list[Any]]:
    """The parts of an array that this process's devices hold, and where each goes."""
    sharding: Any = getattr(x, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    parts: dict[Extent, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(x.shape)).items():
        where = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        parts.setdefault(extent_of(index, x.shape), []).append(where)
    return parts


def _placed(x: Any, parts: dict[Extent, list[Any]], buffers: dict[Extent, np.ndarray]) -> jax.Array:
    sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    shards = [jax.device_put(buffers[part], each) for part, held in parts.items() for each in held]
    jax.block_until_ready(shards)  # before the next arrays are read into memory
    return jax.make_array_from_single_device_arrays(tuple(x.shape), sharding, shards)


def _fill(
    folder: Place, pieces: Sequence[Piece], buffers: dict[str, dict[Extent, np.ndarray]]
) -> dict[str, int]:
    """Reads the pieces that buffers need into them; the number of elements written into each."""
    needed = [p for p in pieces if any(meet(extent, p.extent) for extent in buffers[p.tensor])]
    spans = list(_spans(needed, buffers))
    filled, lock = dict.fromkeys(buffers, 0), threading.Lock()

    def read(span: list[Piece]) -> None:
        begin = span[0].offset
        data = _bytes_of(folder, span[0].file, begin, _end(span[-1], buffers))
        for piece in span:
            part = data[piece.offset - begin : _end(piece, buffers) - begin]
            if zlib.crc32(part) != piece.crc32:
                raise _damaged(folder, f"{piece.file} was changed (its CRC-32 differs)")
            for extent, buffer in buffers[piece.tensor].items():
                block = np.frombuffer(part, buffer.dtype).reshape(shape_of(piece.extent))
                copied = copy_common(buffer, extent, block, piece.extent)
                with lock:
                    filled[piece.tensor] += copied

    if isinstance(folder, StorePath):
        folder.store.each(read, spans)
    else:
        for span in spans:
            read(span)
    return filled


def _spans(pieces: Sequence[Piece], buffers: dict[str, Any]) -> Iterator[list[Piece]]:
    """Pieces that lie one after the other in an object, to read at once."""
    span: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: (each.file, each.offset)):
        if span:
            joined = span[-1].file == piece.file and _end(span[-1], buffers) == piece.offset
            if not joined or _end(piece, buffers) - span[0].offset > SPAN:
                yield span
                span = []
        span.append(piece)
    if span:
        yield span


def _end(piece: Piece, buffers: dict[str, dict[Extent, np.ndarray]]) -> int:
    itemsize = next(iter(buffers[piece.tensor].values())).dtype.itemsize
    return piece.offset + math.prod(shape_of(piece.extent)) * itemsize


def _bytes_of(folder: Place, name: str, start: int, stop: int) -> bytes:
    try:
        data = stores.read_range(folder / name, start, stop)
    except FileNotFoundError as error:
        raise _damaged(folder, f"{name} is missing") from error
    except OSError as error:
        raise _damaged(folder, f"{name}: {reason(error)}") from error
    if len(data) != stop - start:
        raise _damaged(folder, f"{name} ends too early")
    return data


def _read_indexes(folder: Place, manifest: dict[str, Any]) -> dict[str, list[Piece]]:
    """All pieces of each array. Raises DamagedCheckpointError for an index that cannot be right."""
    pieces: dict[str, list[Piece]] = {}
    files = manifest["files"]
    for name in index_files(files):
        data = _bytes_of(folder, name, 0, files[name]["size"])
        if zlib.crc32(data) != files[name]["crc32"]:
            raise _damaged(folder, f"{name} was changed (its CRC-32 differs)")
        try:
            for tensor, extent, file, offset, crc32 in json.loads(data):
                piece = Piece(tensor, tuple((a, b) for a, b in extent), file, offset, crc32)
                if not _fits(piece, manifest):
                    raise ValueError(f"it has a piece of {tensor} that cannot be")
                pieces.setdefault(tensor, []).append(piece)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise _damaged(folder, f"{name} has wrong content: {reason(error)}") from error
    return pieces


def _fits(piece: Piece, manifest: dict[str, Any]) -> bool:
    """True for a piece that lies within its array and within its object."""
    tensor, file = manifest["tensors"][piece.tensor], manifest["files"][piece.file]
    numbers = (*itertools.chain(*piece.extent), piece.offset, piece.crc32)
    if not all(type(number) is int and number >= 0 for number in numbers):
        return False
    shape = tensor["shape"]
    if len(piece.extent) != len(shape):
        return False
    size = math.prod(shape_of(piece.extent)) * jax.numpy.dtype(tensor["dtype"]).itemsize
    inside = all(a < b <= n for (a, b), n in zip(piece.extent, shape, strict=True))
    return inside and piece.offset + size <= file["size"]


def _damaged(folder: Place, cause: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"checkpoint {folder} is damaged: {cause}")
