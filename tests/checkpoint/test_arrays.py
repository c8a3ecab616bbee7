"""The files of a checkpoint's arrays: which device writes a shard, and that others can read it."""

import json

import jax
import numpy as np
import tensorstore
from checkpointing import make_mesh, put

from jaxptd.checkpoint.arrays import PendingWrite, shards_to_write


def test_every_shard_is_written_once_by_devices_in_turn():
    mesh = make_mesh(2, 4)
    tensors = {f"w{i}": put(mesh, np.arange(8.0)) for i in range(8)}  # on all devices
    tensors["v"] = put(mesh, np.arange(8.0), "tp")
    chosen = shards_to_write(tensors)
    assert {shard.device for _, shard in chosen[:8]} == set(jax.devices())
    assert [name for name, _ in chosen] == [f"w{i}" for i in range(8)] + ["v"] * 4
    assert sorted(shard.index[0].start for _, shard in chosen[8:]) == [0, 2, 4, 6]


def test_the_files_are_plain_zarr(tmp_path):
    value = np.arange(32, dtype=np.float32).reshape(4, 8)
    write = PendingWrite(tmp_path, {"a.w": put(make_mesh(2, 4), value, "dp", "tp")})
    files = write.wait()
    names = sorted(path.relative_to(tmp_path).as_posix() for path in files)
    assert names == [*(f"a.w/c.{i}.{j}" for i in range(2) for j in range(4)), "a.w/zarr.json"]
    assert json.loads((tmp_path / "a.w" / "zarr.json").read_text())["shape"] == [4, 8]
    assert (tmp_path / "a.w" / "c.1.3").read_bytes() == value[2:, 6:].tobytes()
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/a.w/"}}
    found = tensorstore.open(spec).result()[1:3, 1:].read().result()
    np.testing.assert_array_equal(found, value[1:3, 1:])


def test_zeros_have_files_too(tmp_path):
    """A file that is gone must be noticed, not read as zeros."""
    files = PendingWrite(tmp_path, {"w": put(make_mesh(8), np.zeros(8))}).wait()
    assert all(path.stat().st_size for path in files)
