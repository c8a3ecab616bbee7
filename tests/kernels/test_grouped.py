"""Grouped matmuls, interpreted op by op, against loops over groups in float64."""

import functools
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from turns import slow

import jaxptd
from jaxptd import compiling
from jaxptd.analysis.jaxprs import equations, flops
from jaxptd.collectives import varying_axes
from jaxptd.errors import UserError
from jaxptd.kernels import grouped
from jaxptd.kernels.grouped import GroupTile, grouped_matmul, multiplied, tiles_of
from jaxptd.mesh import Layout, make_mesh

SMALL, WIDE = GroupTile(16, 16, 16, interpret=True), GroupTile(32, 128, 128, interpret=True)
WHOLE, PARTS = (48, 32, 64), (45, 24, 40)  # R, D, F: tiles of 16 divide all or none of them
BLOCKS = (45, 200, 136)  # several 8-bit blocks, the last ones partial
PRECISIONS = pytest.mark.parametrize("precision", ["native", "fp8"])
SIZES = {
    "some": (17, 0, 5, 20),
    "one_group_has_all": (0, 0, 45, 0),
    "no_row_has_a_group": (0, 0, 0, 0),
    "groups_end_inside_tiles": (1, 15, 17, 3),
    "tiles_are_full": (16, 0, 16, 0),
    "one_row_each": (1, 1, 1, 1),
}


@functools.cache
def both_ways(
    dtype: str, tile: GroupTile | None, precision: Any = "native"
) -> Callable[..., tuple[Array, ...]]:
    """x, w, dy, sizes -> y, dx, dw. tile: None for XLA's implementation."""

    def run(x: Array, w: Array, dy: Array, sizes: Array) -> tuple[Array, ...]:
        y, back = jax.vjp(lambda x, w: multiplied(x, w, sizes, tile, precision), x, w)
        return y, *back(dy)

    return jax.jit(run)


def blocks(values: np.ndarray, rows: int, shape: tuple[int, ...]) -> np.ndarray:
    """Expands a value per block of `rows` rows and 128 columns to one per element."""
    return values.repeat(rows, -2).repeat(128, -1)[..., : shape[-2], : shape[-1]]


def drawn(shape: tuple[int, int, int], groups: int) -> tuple[np.ndarray, ...]:
    """x, w, dy, whose blocks differ in magnitude."""
    rows, size, columns = shape
    rng = np.random.default_rng(rows + groups)
    found = []
    for each, block in ((rows, size), 1), ((groups, size, columns), 128), ((rows, columns), 1):
        numbers = *each[:-2], -(-each[-2] // block), -(-each[-1] // 128)
        sizes = blocks(2.0 ** rng.integers(-3, 4, numbers), block, each)
        found.append(rng.standard_normal(each) * sizes)
    return tuple(found)


def rounded(x: np.ndarray, rows: int) -> np.ndarray:
    """x[.., A, B] rounded to 8-bit blocks, each with a separate power of two."""
    found = np.zeros_like(x)
    for *lead, row, column in np.ndindex(*x.shape[:-2], -(-x.shape[-2] // rows), x.shape[-1]):
        if column % 128 == 0:
            place = *lead, slice(row * rows, (row + 1) * rows), slice(column, column + 128)
            scale = 2.0 ** np.floor(np.log2(448 / np.abs(x[place]).max()))
            bits = (x[place] * scale).astype(np.float32).astype(jnp.float8_e4m3fn)
            found[place] = bits.astype(np.float64) / scale
    return found


def by_loops(
    x: Any, w: Any, dy: Any, sizes: Sequence[int], cut: float = 0.0
) -> tuple[tuple[Any, Any], ...]:
    """y, dx and dw, each with a rounding bound from the number and size of the added terms."""
    results = [np.zeros(shape) for shape in (dy.shape, x.shape, w.shape)]
    bounds = [np.zeros(each.shape) for each in results]
    start = 0
    for group, size in enumerate(sizes):
        own = slice(start, start + size)
        pairs = (x[own], w[group]), (dy[own], w[group].T), (x[own].T, dy[own])
        places = own, own, group
        for result, bound, place, (a, b) in zip(results, bounds, places, pairs, strict=True):
            result[place] = a @ b
            bound[place] = (a.shape[1] * 2.0**-24 + cut) * (np.abs(a) @ np.abs(b))
        start += size
    return tuple(zip(results, bounds, strict=True))


# An 8-bit tensor core truncates each of 32 terms at 2**-13 of the largest.
CUT = 2.0**-8


def hold(
    sizes: Sequence[int],
    shape: tuple[int, int, int],
    dtype: str,
    tile: GroupTile | None,
    precision: str = "native",
) -> None:
    """Checks values and gradients while the rows outside all groups are not finite."""
    cast = [np.asarray(jnp.asarray(a, dtype), np.float64) for a in drawn(shape, len(sizes))]
    x, w, dy = cast
    cut = CUT if precision == "fp8" and tile and not tile.interpret else 0.0
    operands = (rounded(x, 1), rounded(w, 128), rounded(dy, 1)) if precision == "fp8" else cast
    expected = by_loops(*operands, sizes, cut)
    x, dy = x.copy(), dy.copy()
    x[sum(sizes) :], dy[sum(sizes) :] = np.nan, np.inf
    arrays = [jnp.asarray(a, dtype) for a in (x, w, dy)]
    found = both_ways(dtype, tile, precision)(*arrays, jnp.asarray(sizes, jnp.int32))
    for got, (want, bound) in zip(found, expected, strict=True):
        assert got.dtype == jnp.dtype(dtype)
        kind = jnp.finfo(dtype)
        least = float(kind.smallest_subnormal) * (bound > 0)  # zero where there is nothing to add
        of_result = np.maximum(float(kind.eps) * np.abs(want), least) / 2
        error = np.abs(np.asarray(got, np.float64) - want)
        assert (error <= bound + 1.01 * of_result).all()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(PARTS, "float32"), (WHOLE, "bfloat16"), slow(WHOLE, "float32"), slow(PARTS, "float16")],
    ids=str,
)
def test_values_and_gradients_are_those_of_loops(
    sizes: str, shape: tuple[int, int, int], dtype: str
) -> None:
    hold(SIZES[sizes], shape, dtype, SMALL)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("tile", "shape", "dtype"),
    [
        (WIDE, BLOCKS, "float32"),
        (None, BLOCKS, "float32"),
        (SMALL, PARTS, "bfloat16"),
        slow(SMALL, BLOCKS, "bfloat16"),
        slow(None, PARTS, "bfloat16"),
        slow(WIDE, (48, 256, 128), "float16"),
    ],
    ids=str,
)
def test_in_8_bits_they_are_those_of_loops_over_rounded_blocks(
    sizes: str, tile: GroupTile | None, shape: tuple[int, int, int], dtype: str
) -> None:
    hold(SIZES[sizes], shape, dtype, tile, "fp8")


@pytest.mark.slow
def test_compiled_for_gpus_they_need_no_memory_beside_their_results(tmp_path: Path) -> None:
    """XLA's version copies x for each group, and more in backward. Needs the extra `h200`.

    The 8-bit kernels store rounded operands, and use 8-bit tensor cores.
    """
    pytest.importorskip("jax_cuda13_plugin")
    rows, size, columns, groups = 16384, 2048, 1536, 16
    mesh = jax.sharding.Mesh(np.array(compiling.gpus(1)), ("dp",))

    def of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    shapes = of(rows, size), of(groups, size, columns), of(rows, columns)
    sizes = of(groups, dtype=jnp.int32)

    def compiled(tile: GroupTile | None, precision: str) -> tuple[float, set[str]]:
        """Returns (MiB of temporary memory, tensor core instructions)."""
        both = both_ways("bfloat16", tile, precision)
        run = jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P())
        where = tmp_path / f"{tile is None} {precision}"
        seen = {"xla_dump_to": str(where), "xla_dump_emitter_re": "triton.*"}
        program = jax.jit(run).lower(*shapes, sizes).compile(seen)
        kernels = "".join(path.read_text() for path in where.glob("*_kernel*"))
        instructions = set(re.findall(r"wgmma\.mma_async[\w.]*|mma\.sync[\w.]*", kernels))
        return program.memory_analysis().temp_size_in_bytes / 2**20, instructions

    (ours, native), (xlas, _) = compiled(grouped.TILE, "native"), compiled(None, "native")
    (in_8_bits, eight), (xlas_8_bits, _) = compiled(grouped.TILE_FP8, "fp8"), compiled(None, "fp8")
    print(f"temporary MiB: {ours:.2f} by our kernels, {xlas:.2f} by XLA")
    print(f"in 8 bits: {in_8_bits:.2f} by our kernels, {xlas_8_bits:.2f} by XLA")
    assert ours < 1 < 1024 <= xlas
    operands = rows * (size + columns) + 2 * groups * size * columns
    assert in_8_bits < 1.04 * operands / 2**20 < 1024 < xlas_8_bits  # 4 bytes per block of 128
    assert {each.split("m64n128")[1] for each in native} == {"k16.f32.bf16.bf16"}
    assert {each.split("m64n128")[1] for each in eight} == {
        "k16.f32.bf16.bf16",  # for the gradient of matrices
        "k32.f32.e4m3.e4m3",
    }


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [PARTS, (512, 256, 384)], ids=str)
@PRECISIONS
def test_gpus_compute_the_same(
    sizes: str, shape: tuple[int, int, int], dtype: str, precision: str
) -> None:
    tile = grouped.TILE if precision == "native" else grouped.TILE_FP8
    hold(SIZES[sizes], shape, dtype, tile, precision)


@pytest.mark.parametrize("sizes", SIZES)
def test_xla_computes_the_same(sizes: str) -> None:
    hold(SIZES[sizes], PARTS, "float32", None)


@PRECISIONS
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 45), min_size=3, max_size=3))
def test_any_sizes(precision: str, cuts: list[int]) -> None:
    ends = sorted(cuts)
    sizes = ends[0], ends[1] - ends[0], ends[2] - ends[1], 0
    shape, tile = (PARTS, SMALL) if precision == "native" else (BLOCKS, WIDE)
    hold(sizes, shape, "float32", tile, precision)


def test_one_group_is_a_matmul() -> None:
    hold((48,), WHOLE, "float32", SMALL)


@pytest.mark.parametrize("shape", [(0, 24, 40), (45, 0, 40)], ids=str)
@PRECISIONS
def test_nothing_is_multiplied_where_there_is_nothing(
    shape: tuple[int, int, int], precision: str
) -> None:
    hold((0, 0), shape, "float32", SMALL, precision)


ROWS, EACH = 64, 16


@functools.cache
def tiles_at() -> Callable[[Array], Array]:
    return jax.jit(lambda sizes: tiles_of(sizes, ROWS, EACH))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, ROWS), min_size=4, max_size=4))
def test_every_row_is_in_one_tile_of_its_group(cuts: list[int]) -> None:
    sizes = np.diff(sorted(cuts), prepend=0)
    group_of = np.repeat(np.arange(5), [*sizes, ROWS - sizes.sum()])
    found = np.full(ROWS, -1)
    for group, first, end in np.asarray(tiles_at()(sizes)).T:
        place = slice(first, min(first + EACH, end))
        assert (found[place] == -1).all()
        found[place] = group
    np.testing.assert_array_equal(found, group_of)


@pytest.mark.parametrize(
    ("tile", "precision"), [(GroupTile(), "native"), (GroupTile(), "fp8"), (None, "fp8")]
)
def test_the_gradient_of_matrices_that_devices_share_is_a_sum(
    tile: GroupTile | None, precision: Any
) -> None:
    def run(x: Array, w: Array, sizes: Array) -> Any:
        y, back = jax.vjp(lambda x, w: multiplied(x, w, sizes, tile, precision), x, w)
        found = y, *back(y)
        assert [varying_axes(a) for a in found] == [{"dp"}, {"dp"}, set()]
        return found

    specs, mesh = (P("dp"), P(), P("dp")), make_mesh(Layout(dp=2))
    on_mesh = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(P("dp"), P("dp"), P()))
    arrays = jnp.ones((90, 24)), jnp.ones((4, 24, 40)), jnp.ones(8, jnp.int32)
    assert "psum" in str(jax.make_jaxpr(on_mesh)(*arrays))


@PRECISIONS
def test_its_flops_are_counted(precision: str) -> None:
    """The FLOPs of one matrix per row, three times: for the matmul and both gradients."""
    rows, size, columns = WHOLE
    shapes = (rows, size), (4, size, columns), (rows, columns)
    x, w, dy = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    for tile in (SMALL, None):
        traced = jax.make_jaxpr(both_ways("float32", tile, precision))(x, w, dy, sizes)
        kernels = [each for each in equations(traced) if each.primitive.name != "dot_general"]
        assert sum(map(flops, kernels)) == 3 * 2 * rows * size * columns


# ---- the function that a model calls -------------------------------------------------------------


def test_gpus_have_our_kernels_and_cpus_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = np.ones((4, 2), np.float32), np.ones((2, 2, 3), np.float32)
    sizes, ran = np.array([1, 2]), []
    monkeypatch.setattr(grouped, "multiplied", lambda *given: ran.append(given[3]))
    jaxptd.grouped_matmul(x, w, sizes)
    monkeypatch.setattr(grouped, "_on_gpus", lambda: True)
    jaxptd.grouped_matmul(x, w, sizes)
    jaxptd.grouped_matmul(x, w, sizes, precision="fp8")
    jaxptd.grouped_matmul(x, w, sizes, kernel="xla")
    with jax.enable_x64(True):  # no kernel supports float64
        doubles = [each.astype(np.float64) for each in (x, w)]
        jaxptd.grouped_matmul(*doubles, sizes)
        with pytest.raises(UserError, match="kernel=triton: it has float32, .* not float64"):
            jaxptd.grouped_matmul(*doubles, sizes, kernel="triton")
    assert ran == [None, grouped.TILE, grouped.TILE_FP8, None, None]


def test_a_gpu_without_8_bit_matmuls_has_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    old, ran = types.SimpleNamespace(compute_capability="8.0"), []
    monkeypatch.setattr(grouped, "_on_gpus", lambda: True)
    monkeypatch.setattr(jax, "devices", lambda: [old])
    monkeypatch.setattr(grouped, "multiplied", lambda *given: ran.append(given[3]))
    given = jnp.ones((4, 2)), jnp.ones((2, 2, 3)), jnp.array([1, 2])
    for precision in ("native", "fp8"):
        jaxptd.grouped_matmul(*given, precision=precision)
    assert ran == [grouped.TILE, None]
    with pytest.raises(UserError, match=r"precision=fp8 needs compute capability 8\.9, not 8\.0"):
        jaxptd.grouped_matmul(*given, kernel="triton", precision="fp8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": jnp.ones((4, 3))}, r"x has shape \(4, 3\), w \(2, 2, 3\) and sizes \(2,\); give"),
        ({"sizes": jnp.ones(3, jnp.int32)}, "give x"),
        ({"w": jnp.ones((2, 3))}, "give x"),
        ({"w": jnp.ones((2, 2, 3), jnp.bfloat16)}, "x is float32 and w bfloat16"),
        ({"x": jnp.ones((4, 2), jnp.int32)}, "x is int32"),
        ({"x": [[1.0, 2.0]]}, "x is a list; expected an Array or a NumPy array"),
        ({"sizes": jnp.ones(2)}, "sizes are float32; give integers"),
        ({"sizes": jnp.array([3, 2])}, "sizes from 2 to 3 add up to 5, but x has 4 rows"),
        ({"sizes": jnp.array([-1, 2])}, "sizes from -1 to 2 .*; use sizes of 0 or more, whose"),
        ({"kernel": "triton"}, "kernel=triton: it needs NVIDIA GPUs; leave kernel out"),
        ({"kernel": "cuda"}, "kernel is 'cuda'; expected one of triton, xla"),
        ({"precision": "int8"}, "precision is 'int8'; expected one of native, fp8"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    fits = {"x": jnp.ones((4, 2)), "w": jnp.ones((2, 2, 3)), "sizes": jnp.array([1, 2])}
    with pytest.raises(UserError, match=words):
        grouped_matmul(**fits | change)
