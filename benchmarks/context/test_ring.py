"""The benchmark of ring attention: every program is one, and work is counted rightly."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.context import ring, ring_programs
from benchmarks.lib.measure import DifferentError
from jaxptd.analysis.device_flops import work_per_device
from jaxptd.errors import UserError
from jaxptd.mesh import Layout, make_mesh

SIZE = ring.Size(1, 32, 2, 4)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(Layout(cp=4))


def test_every_program_computes_attention(mesh: Mesh) -> None:
    runs = ring.measure(SIZE, mesh, chunks=[4], steps=2)  # raises, if one does not
    names = ["jaxptd zigzag", "jaxptd blockwise", "jaxptd rsa", "gather", "jit"]
    installed = all(map(importlib.util.find_spec, ("ringattention", "einops")))
    assert [run.program.name for run in runs] == names + ["ringattention"] * installed
    assert all(len(run.seconds) == 2 and 0 < run.error <= ring.TOLERANCE for run in runs)
    text = ring.section(SIZE, runs)
    assert text.count("\n| jaxptd") == 3
    assert (ring_programs.INSTALL in text) is not installed
    zigzag = next(line for line in text.splitlines() if "jaxptd zigzag" in line)
    assert zigzag.count("**") == 4
    assert "collective-permute" in zigzag


def test_another_program_is_noticed(mesh: Mesh) -> None:
    def blind(q: Array, k: Array, v: Array) -> Array:
        return ring_programs.ours("blockwise", 4).attention(q, k, 2 * v)

    arrays = SIZE.random()
    program = dataclasses.replace(ring_programs.ours("blockwise", 4), attention=blind)
    with pytest.raises(DifferentError, match="jaxptd blockwise is .* off one device"):
        ring.start(program, mesh, arrays).check(ring.plain(*arrays))


def fake(name: str, *, ours: bool, temp: int, chunk: int | None = None) -> Any:
    program = ring_programs.Program(name, lambda q, k, v: q, chunk, ours=ours)

    class Fake(ring.Run):
        @property
        def temp(self) -> float:
            return temp

    return Fake(program, None, [], np.arange(1), "", seconds=[temp / 100])


def test_ours_is_held_against_the_best_peer_of_its_chunk() -> None:
    peers = [fake("a", ours=False, temp=400), fake("b", ours=False, temp=200, chunk=8)]
    peers.append(fake("c", ours=False, temp=50, chunk=2))
    mine = fake("mine", ours=True, temp=100, chunk=8)
    assert ring.share(mine, [mine, *peers], "temp") == 0.5
    assert ring.share(mine, [mine, *peers], "median") == 0.5
    assert ring.share(peers[0], [mine, *peers], "temp") is None
    assert ring.share(mine, [mine], "temp") is None


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_work_is_balanced_by_zigzag_and_by_nothing_else(devices: int) -> None:
    assert ring.balance("zigzag", devices, 64) <= ring.GOALS["work"]
    # The last of n contiguous parts sees n whole blocks, the mean one (n + 1) / 2.
    contiguous = ring.balance("blockwise", devices, 64)
    assert contiguous == pytest.approx(2 * devices / (devices + 1), rel=0.01)


def counted(f: Callable[[Array], Array], mesh: Mesh) -> list[int]:
    """Products of each device, as numbers of 4 x 4 times 4 x 4."""
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    work = work_per_device(jax.jit(mapped).trace(jnp.ones((4, 4))).jaxpr, mesh)
    return (work.ravel() / (2 * 4**3)).tolist()


def test_branch_of_each_device_is_counted(mesh: Mesh) -> None:
    def f(x: Array) -> Array:
        return lax.cond((lax.axis_index("cp") + 2) % 4 < 1, lambda: x @ x @ x, lambda: x)

    assert counted(f, mesh) == [0, 0, 2, 0]


def test_branch_of_each_step_is_counted(mesh: Mesh) -> None:
    def f(x: Array) -> Array:
        def step(x: Array, number: Array) -> tuple[Array, None]:
            x = x @ x
            return lax.cond(number > lax.axis_index("cp"), lambda: x @ x, lambda: x), None

        return lax.scan(step, x, np.arange(3))[0]

    assert counted(f, mesh) == [3 + 2, 3 + 1, 3, 3]


def test_counter_of_a_loop_is_known(mesh: Mesh) -> None:
    def f(x: Array) -> Array:
        last = lax.axis_index("cp")
        return lax.while_loop(lambda c: c[0] < last, lambda c: (c[0] + 1, c[1] @ x), (0, x))[1]

    assert counted(f, mesh) == [0, 1, 2, 3]


def test_products_are_whole_ones(mesh: Mesh) -> None:
    def f(x: Array) -> Array:
        return jnp.einsum("bij,bjk->ik", jnp.ones((3, 4, 4)), jnp.tril(jnp.ones((3, 4, 4)))) + x

    assert counted(f, mesh) == [3] * 4


def test_work_that_depends_on_data_is_refused(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"depend on data: branches of \[0, 128\] FLOPs"):
        counted(lambda x: lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x), mesh)
    with pytest.raises(ValueError, match="a product in a while loop"):
        counted(lambda x: lax.while_loop(lambda y: y[0, 0] > 0, lambda y: y @ y, x), mesh)
    assert counted(lambda x: lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x.T @ x), mesh) == [1] * 4
    with pytest.raises(ValueError, match="outside of every shard_map"):
        work_per_device(jax.jit(jnp.matmul).trace(jnp.ones((4, 4)), jnp.ones((4, 4))).jaxpr, mesh)


def test_length_that_no_zigzag_splits_is_refused() -> None:
    with pytest.raises(UserError, match="--length 100 does not split into 16 chunks"):
        ring.main(["--length", "100"])
