"""The benchmark of ring attention: every program computes it, and work is counted rightly."""

import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import Mesh, NamedSharding

from benchmarks.context import ring, ring_programs
from benchmarks.lib.compiler import QUICK
from benchmarks.lib.measure import DifferentError
from jaxptd.errors import UserError
from jaxptd.mesh import Layout, RingKind, make_mesh

SIZE = ring.Size(1, 32, 2, 4)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(Layout(cp=4))


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("devices", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_work_is_balanced_by_zigzag_and_by_nothing_else(devices: int) -> None:
    assert ring.balance("zigzag", devices, 64) <= ring.GOALS["work"]
    # The last of n contiguous chunks sees n - 1 whole blocks and three quarters of its own, the
    # mean one (n - 1) / 2.
    contiguous = ring.balance("blockwise", devices, 64)
    assert contiguous == pytest.approx((4 * devices - 1) / (2 * devices + 1), rel=0.01)


@pytest.mark.parametrize("kind", ["zigzag", pytest.param("blockwise", marks=pytest.mark.slow)])
def test_scores_of_a_whole_block_are_never_in_memory(kind: RingKind) -> None:
    """Those of a block of 256 tokens and 4 heads would be 1 MiB, in backward twice."""
    mesh = make_mesh(Layout(cp=8))
    each: Any = jax.ShapeDtypeStruct(
        (1, 2048, 4, 32), jnp.float32, sharding=NamedSharding(mesh, ring.CUT)
    )
    lowered = ring_programs.ours(kind, 512).gradients(mesh).lower(*[each] * 4)
    compiled = lowered.compile(compiler_options=QUICK)
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 2**20


def test_length_that_no_zigzag_splits_is_refused() -> None:
    with pytest.raises(UserError, match="--length 100 does not split into 16 chunks"):
        ring.main(["--length", "100"])
