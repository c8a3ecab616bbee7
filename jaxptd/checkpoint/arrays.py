"""Reading and writing the arrays of a checkpoint; the only file that imports tensorstore.

An array is a folder in zarr format 3, whose chunks are the shards it was saved in, a file for each.
A process writes the shards on its devices; any process can read any section of an array.

Source: Zarr core specification, version 3, https://zarr-specs.readthedocs.io/en/latest/v3/core.
"""

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from jax.sharding import SingleDeviceSharding

from jaxptd.checkpoint.background import Background
from jaxptd.checkpoint.errors import CheckpointError, reason
from jaxptd.distributed.coordination import is_first

METADATA = "zarr.json"


class PendingWrite:
    """Writes this process's shards in the background; the caller may donate the arrays at once.

    On accelerators the shards are copied to the host first. On the CPU only a view of each buffer
    is kept, so a step that donates the buffer writes into a copy instead.

    Args:
        folder: of the arrays.
        tensors: arrays by name.
    """

    def __init__(self, folder: Path, tensors: dict[str, jax.Array]) -> None:
        self._folder, self._tensors = folder, tensors
        shards = shards_to_write(tensors)
        for _, shard in shards:  # all copies before the first is waited for
            shard.data.copy_to_host_async()
        self._shards = [(name, shard.index, np.asarray(shard.data)) for name, shard in shards]
        self._writing = Background(self._write)

    def wait(self) -> list[Path]:
        """Waits until all is written; the files of this process. Raises tensorstore's error."""
        self._writing.wait()
        files = [
            self._folder / name / _chunk_file(index, self._tensors[name])
            for name, index, _ in self._shards
        ]
        return files + [self._folder / name / METADATA for name in self._tensors if is_first()]

    def abort(self) -> None:
        """Returns when nothing is being written any more, after a failure on any process."""
        with contextlib.suppress(Exception):
            self._writing.wait()

    def _write(self) -> None:
        # Process 0 writes the metadata, which the others need not read.
        how = {"create": True} if is_first() else {"open": True, "assume_metadata": True}
        opened = [
            tensorstore.open(_location(self._folder / name) | _layout(x) | how)
            for name, x in self._tensors.items()
        ]
        stores = dict(zip(self._tensors, _results(opened), strict=True))
        _results(
            # The data is not copied again: nobody writes into it.
            stores[name][index].write(data, can_reference_source_data_indefinitely=True)
            for name, index, data in self._shards
        )


def shards_to_write(tensors: dict[str, jax.Array]) -> list[tuple[str, Any]]:
    """This process's shards that it writes, with names: one replica of each, devices in turn."""
    chosen = []
    for number, (name, x) in enumerate(tensors.items()):
        shard_size = math.prod(x.sharding.shard_shape(x.shape))
        replicas = len(x.sharding.device_set) * shard_size // x.size
        shards = x.addressable_shards
        chosen += [(name, shard) for shard in shards if shard.replica_id == number % replicas]
    return chosen


def load(folder: Path, wanted: dict[str, Any], *, checkpoint: Path) -> dict[str, jax.Array]:
    """Reads the arrays that a `PendingWrite` wrote.

    Args:
        folder: of the arrays.
        wanted: shape, dtype and sharding (None: the first device) by name.
        checkpoint: the checkpoint's folder, for messages.

    Raises:
        CheckpointError: tensorstore cannot read them, or JAX does not have the dtype.
    """
    for name, x in wanted.items():
        if (have := jax.dtypes.canonicalize_dtype(x.dtype)) != x.dtype:
            raise CheckpointError(
                f"checkpoint {checkpoint}: {name} is {x.dtype}, jax made it {have}; "
                'call jax.config.update("jax_enable_x64", True)'
            )
    try:
        stores = _results([tensorstore.open(_location(folder / name)) for name in wanted])
        return {
            name: _read(store, x) for store, (name, x) in zip(stores, wanted.items(), strict=True)
        }
    except Exception as error:  # the files are intact: another tensorstore, too little memory
        raise CheckpointError(f"could not read checkpoint {checkpoint}: {reason(error)}") from error


def _read(store: Any, wanted: Any) -> jax.Array:
    """Reads the shards of an array on this process's devices, each distinct shard once."""
    sharding = getattr(wanted, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    indices: Any = sharding.addressable_devices_indices_map(wanted.shape).values()
    sections = {_bounds(index, wanted.shape): index for index in indices}
    reads = {bounds: store[index].read() for bounds, index in sections.items()}
    return jax.make_array_from_callback(
        wanted.shape, sharding, lambda index: reads[_bounds(index or (), wanted.shape)].result()
    )


def _results(futures: Iterable[Any]) -> list[Any]:
    """Waits for all futures, also after a failure, and returns their results."""
    started = list(futures)
    for future in started:
        future.exception()
    return [future.result() for future in started]


def _location(folder: Path) -> Any:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder.absolute()}/"}}


def _layout(x: jax.Array) -> Any:
    """How an array is stored: one uncompressed chunk for each shard, also where it is all zeros."""
    chunks = {"chunk_shape": x.sharding.shard_shape(x.shape)}
    metadata = {
        "shape": x.shape,
        "data_type": str(x.dtype),
        "chunk_grid": {"name": "regular", "configuration": chunks},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    return {"metadata": metadata, "store_data_equal_to_fill_value": True}


def _chunk_file(index: tuple[slice, ...], x: jax.Array) -> str:
    """The file of a shard in its array's folder."""
    sizes = x.sharding.shard_shape(x.shape)
    starts = [start for start, _ in _bounds(index, x.shape)]
    return ".".join(["c", *(str(start // n) for start, n in zip(starts, sizes, strict=True))])


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """First element, and the one after the last, along each dim."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
