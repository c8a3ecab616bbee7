"""States to save, checks on them, and a way to run code in another process."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxptd.checkpoint import Checkpoints

ROOT = Path(__file__).parents[2]
DESCRIPTION = {"config": {"model": {"num_layers": 2}, "source": ["a", "b"], "lr": 3e-4}}
START = f"""
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "helpers")!r}]
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from checkpointing import make_state, newest, save
from jaxptd.checkpoint import CheckpointError, Checkpoints
directory = Path(sys.argv[1])
"""


def make_mesh(*sizes):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    names = ("dp", "tp")[: len(sizes)]
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(sizes))


def put(mesh, value, *spec):
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


def make_state(seed=0, *sizes):
    """Every kind of tensor a run holds, on 2 x 4 devices; the seed decides the values."""
    draw, mesh = np.random.default_rng(seed), make_mesh(*(sizes or (2, 4)))
    weight = draw.standard_normal((4, 8))
    return {
        "params": {
            "blocks.mlp.w": put(mesh, jnp.asarray(weight, jnp.bfloat16), None, "tp"),
            "norm": put(mesh, draw.standard_normal(8).astype(np.float32), "dp"),
        },
        "optimizer": {
            "mu": {"blocks.mlp.w": put(mesh, weight.astype(np.float32), "dp", "tp")},
            "count": put(mesh, jnp.int32(seed)),
        },
    }


def abstract(state, mesh=None, *spec):
    """The state's shapes and dtypes, with its current sharding or that of another mesh."""

    def leaf(x):
        sharding = NamedSharding(mesh, PartitionSpec(*spec[: x.ndim])) if mesh else x.sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(leaf, state)


def assert_same(got, expected):
    """Compares names, dtypes and every bit."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_same_shards(got, expected):
    """Compares sharding and every bit of the shards on this process's devices."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.sharding) == (b.dtype, b.sharding)
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()


def save(directory, *steps, keep=9):
    checkpoints = Checkpoints(directory, keep=keep)
    for step in steps:
        checkpoints.save(step, make_state(step), description=DESCRIPTION | {"step": step})
    return checkpoints


def newest(directory, expect_reports=0):
    """Step of the newest good checkpoint, after checking its state against `make_state(step)`."""
    reports = []
    found = Checkpoints(directory, keep=9).restore_newest(
        abstract(make_state()), report=reports.append
    )
    assert len(reports) == expect_reports, reports
    if found is not None:
        assert_same(found[1], make_state(found[0]))
    return found and found[0]


def disk_full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuse(*_, **__):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def run_python(code, *args):
    """Runs START and then code in another process; `directory` is the first argument."""
    command = [sys.executable, "-W", "error", "-c", START + textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)
