"""The benchmark of products on a grid: every program is one, and its memory is counted rightly."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from benchmarks.grid import summa2d, summa2d_programs
from benchmarks.lib.measure import DifferentError
from jaxptd.errors import UserError
from jaxptd.mesh import make_mesh

SIZE = summa2d.Size(32, 16, 64)
MIB = 2**20


@pytest.mark.slow
def test_every_program_computes_the_pair() -> None:
    runs = summa2d.measure(SIZE, 4, steps=2)  # raises, if one does not
    grid = ["gather", "gather in 2 slices", "gather in 4 slices", "summa", "fox", "cannon"]
    peers = ["autodiff", "jit", "Megatron", "Megatron, gathering again"]
    assert [run.program.name for run in runs] == [f"jaxptd {name}" for name in grid] + peers
    assert all(len(run.seconds) == 2 and 0 < run.error <= summa2d.TOLERANCE for run in runs)
    lines = summa2d.section(SIZE, 4, runs).splitlines()[4:]
    assert [line.count("|") for line in lines] == [len(summa2d.HEAD) + 1] * len(runs)
    assert [line.count("**") for line in lines] == [2] * len(grid) + [0] * len(peers)


def test_grid_that_is_not_square_has_no_rings() -> None:
    programs = list(summa2d_programs.programs(8))
    assert summa2d_programs.grids(8) == [(2, 4), (4, 2)]
    assert {p.layout.matmul2d for p in programs} == {"gather", "summa"}
    assert not summa2d_programs.grids(10)


def test_another_program_is_noticed() -> None:
    program = summa2d_programs.grid("gather", 2, 2)

    def products(x: Array, w1: Array, w2: Array) -> Array:
        return program.products(x, 2 * w1, w2)

    arrays = SIZE.random()
    other = dataclasses.replace(program, products=products)
    run = summa2d.start(other, make_mesh(other.layout), arrays)
    with pytest.raises(DifferentError, match="jaxptd gather is .* off one device"):
        run.check(summa2d.plain(*arrays))


def kept(program: summa2d_programs.Program) -> float:
    """The float32 numbers that a device keeps."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SIZE.shapes[:3]]
    return program.kept(make_mesh(program.layout), shapes) / 4


def test_what_is_kept_for_backward_is_counted() -> None:
    M, D, F = SIZE.M, SIZE.D, SIZE.F
    local = (M * D + M * F + 2 * D * F) // 4  # x, h, w1, w2
    for algorithm in ("gather", "summa", "fox", "cannon"):
        assert kept(summa2d_programs.grid(algorithm, 2, 2)) == local
    mesh = make_mesh(summa2d_programs.grid("gather", 2, 2).layout)
    assert kept(summa2d_programs.partitioned(mesh)) == local
    assert kept(summa2d_programs.gathered(2, 2)) == 2 * local
    peers = [p for p in summa2d_programs.programs(4) if p.layout.tp == 4]
    assert [kept(peer) for peer in peers] == [local + 3 * M * D // 4, local]


def test_bytes_are_told_apart_by_axis() -> None:
    program, M, D, F = summa2d_programs.grid("gather", 2, 2), SIZE.M, SIZE.D, SIZE.F
    run = summa2d.start(program, make_mesh(program.layout), SIZE.random())
    # Blocks of a quarter, each sent once: forward, and twice in backward; two a product.
    assert run.wire == {"col": 3 * (M * D + M * F), "row": 3 * 2 * D * F}
    assert run.messages == 12
    cut = summa2d_programs.grid("gather", 2, 2, slices=2)
    sliced = summa2d.start(cut, make_mesh(cut.layout), SIZE.random())
    assert (sliced.wire, sliced.messages) == (run.wire, 24)


def fake(name: str, *, ours: bool, seconds: list[float]) -> Any:
    program = dataclasses.replace(summa2d_programs.grid("gather", 2, 2), name=name, ours=ours)

    class Fake(summa2d.Run):
        @property
        def temp(self) -> float:
            return 3 * MIB

    return Fake(
        program, None, [], MIB, {"row": MIB, "col": MIB // 2}, 7, error=1e-7, seconds=seconds
    )


def test_programs_are_held_against_the_fastest_peer() -> None:
    slow, fast = (fake(name, ours=False, seconds=[s]) for name, s in (("a", 4), ("b", 2)))
    mine = fake("mine", ours=True, seconds=[9, 1, 1])
    assert summa2d.share(mine, [mine, slow, fast]) == 0.5
    assert summa2d.share(slow, [mine, slow, fast]) == 2
    assert summa2d.row(mine, [mine, slow, fast])[1:] == [
        "2 x 2",
        "1000",
        "**0.50**",
        "3.0",
        "1.0",
        "col 0.50 + row 1.00 = 1.50",
        "7",
        "1e-07",
    ]


def test_without_a_gpu_there_is_no_floor() -> None:
    assert summa2d.floor() == "No GPU here (JAX finds cpu): no floor in bfloat16."
    text = summa2d.floor([SIZE], steps=1, gpu=False)
    assert text.splitlines()[-1].startswith("| 32 | 16 | 64 | ")
    assert SIZE.flops == 12 * 32 * 16 * 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "4", "10"], "--devices 10 makes no grid, square or 1:2; use 4, 8 or 16"),
        (["--size", "64x32x48"], "M=64, D=32, F=48 does not split over 8 .*; use multiples of 32"),
        (["--size", "64x32"], "--size: 64x32 is not MxDxF; see --help"),
    ],
    ids=["devices", "sizes", "spelling"],
)
def test_bad_options_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        summa2d.main(words)
