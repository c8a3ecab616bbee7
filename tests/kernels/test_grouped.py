"""Grouped matmuls, run operation by operation, against loops over groups in float64."""

import functools
from collections.abc import Callable, Sequence
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
from jaxptd.kernels.grouped import GroupTile, by_tiles, grouped_matmul, tiles_of
from jaxptd.mesh import Layout, make_mesh

SMALL = GroupTile(16, 16, 16, interpret=True)
WHOLE, PARTS = (48, 32, 64), (45, 24, 40)  # R, D, F: tiles of 16 divide all, or none
SIZES = {
    "some": (17, 0, 5, 20),
    "one_group_has_all": (0, 0, 45, 0),
    "no_row_has_a_group": (0, 0, 0, 0),
    "groups_end_inside_tiles": (1, 15, 17, 3),
    "tiles_are_full": (16, 0, 16, 0),
    "one_row_each": (1, 1, 1, 1),
}


@functools.cache
def both_ways(dtype: str, tile: GroupTile | None) -> Callable[..., tuple[Array, ...]]:
    """x, w, dy, sizes -> y, dx, dw. tile: None for XLA's."""

    def run(x: Array, w: Array, dy: Array, sizes: Array) -> tuple[Array, ...]:
        def product(x: Array, w: Array) -> Array:
            if tile is None:
                return grouped_matmul(x, w, sizes, kernel="xla")
            return by_tiles(x, w, sizes, tile)

        y, back = jax.vjp(product, x, w)
        return y, *back(dy)

    return jax.jit(run)


def drawn(shape: tuple[int, int, int], groups: int) -> tuple[np.ndarray, ...]:
    """x, w, dy."""
    rows, size, columns = shape
    rng = np.random.default_rng(rows + groups)
    shapes = (rows, size), (groups, size, columns), (rows, columns)
    return tuple(rng.standard_normal(each) for each in shapes)


def by_loops(x: Any, w: Any, dy: Any, sizes: Sequence[int]) -> tuple[tuple[Any, Any], ...]:
    """y, dx and dw, each with the bound of its rounding: terms added up, of what size."""
    results = [np.zeros(shape) for shape in (dy.shape, x.shape, w.shape)]
    bounds = [np.zeros(each.shape) for each in results]
    start = 0
    for group, size in enumerate(sizes):
        own = slice(start, start + size)
        pairs = (x[own], w[group]), (dy[own], w[group].T), (x[own].T, dy[own])
        places = own, own, group
        for result, bound, place, (a, b) in zip(results, bounds, places, pairs, strict=True):
            result[place] = a @ b
            bound[place] = a.shape[1] * 2.0**-24 * (np.abs(a) @ np.abs(b))
        start += size
    return tuple(zip(results, bounds, strict=True))


def hold(sizes: Sequence[int], shape: tuple[int, int, int], dtype: str, tile: Any) -> None:
    """Asserts values and gradients, where rows of no group are NaN."""
    cast = [np.asarray(jnp.asarray(a, dtype), np.float64) for a in drawn(shape, len(sizes))]
    x, w, dy = cast
    expected = by_loops(x, w, dy, sizes)
    x, dy = x.copy(), dy.copy()
    x[sum(sizes) :] = dy[sum(sizes) :] = np.nan
    arrays = [jnp.asarray(a, dtype) for a in (x, w, dy)]
    found = both_ways(dtype, tile)(*arrays, jnp.asarray(sizes, jnp.int32))
    for got, (want, bound) in zip(found, expected, strict=True):
        assert got.dtype == jnp.dtype(dtype)
        of_result = float(jnp.finfo(dtype).eps) / 2 * np.abs(want)
        error = np.abs(np.asarray(got, np.float64) - want)
        assert (error <= bound + 1.01 * of_result).all()  # zero where nothing is added


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


@pytest.mark.slow
def test_compiled_for_gpus_they_need_no_memory_beside_their_results() -> None:
    """XLA's own makes a copy of x for each group, and more backward. Needs the extra `h200`."""
    pytest.importorskip("jax_cuda13_plugin")
    rows, size, columns, groups = 16384, 2048, 1536, 16
    mesh = jax.sharding.Mesh(np.array(compiling.gpus(1)), ("dp",))

    def of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    shapes = of(rows, size), of(groups, size, columns), of(rows, columns)
    sizes = of(groups, dtype=jnp.int32)
    found = []
    for tile in (GroupTile(), None):
        run = jax.shard_map(both_ways("bfloat16", tile), mesh=mesh, in_specs=P(), out_specs=P())
        compiled = jax.jit(run).lower(*shapes, sizes).compile()
        found.append(compiled.memory_analysis().temp_size_in_bytes / 2**20)
    print(f"temporary MiB: {found[0]:.2f} by our kernels, {found[1]:.2f} by XLA")
    assert found[0] < 1 < 1024 <= found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [PARTS, (512, 256, 384)], ids=str)
def test_gpus_compute_the_same(sizes: str, shape: tuple[int, int, int], dtype: str) -> None:
    hold(SIZES[sizes], shape, dtype, GroupTile())


@pytest.mark.parametrize("sizes", SIZES)
def test_xla_computes_the_same(sizes: str) -> None:
    hold(SIZES[sizes], PARTS, "float32", None)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 45), min_size=3, max_size=3))
def test_any_sizes(cuts: list[int]) -> None:
    ends = sorted(cuts)
    hold([ends[0], ends[1] - ends[0], ends[2] - ends[1], 0], PARTS, "float32", SMALL)


def test_one_group_is_a_matmul() -> None:
    hold((48,), WHOLE, "float32", SMALL)


@pytest.mark.parametrize("shape", [(0, 24, 40), (45, 0, 40)], ids=str)
def test_nothing_is_multiplied_where_there_is_nothing(shape: tuple[int, int, int]) -> None:
    hold((0, 0), shape, "float32", SMALL)


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


def test_the_gradient_of_matrices_that_devices_share_is_a_sum() -> None:
    def run(x: Array, w: Array, sizes: Array) -> Any:
        y, back = jax.vjp(lambda x, w: by_tiles(x, w, sizes, GroupTile()), x, w)
        found = y, *back(y)
        assert [varying_axes(a) for a in found] == [{"dp"}, {"dp"}, set()]
        return found

    specs, mesh = (P("dp"), P(), P("dp")), make_mesh(Layout(dp=2))
    on_mesh = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(P("dp"), P("dp"), P()))
    arrays = jnp.ones((90, 24)), jnp.ones((4, 24, 40)), jnp.ones(8, jnp.int32)
    assert "psum" in str(jax.make_jaxpr(on_mesh)(*arrays))


def test_its_flops_are_counted() -> None:
    """Those of one matrix a row, three times: of the product and of both gradients."""
    rows, size, columns = WHOLE
    shapes = (rows, size), (4, size, columns), (rows, columns)
    x, w, dy = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    for tile in (SMALL, None):
        traced = jax.make_jaxpr(both_ways("float32", tile))(x, w, dy, sizes)
        kernels = [each for each in equations(traced) if each.primitive.name != "dot_general"]
        assert sum(map(flops, kernels)) == 3 * 2 * rows * size * columns


# ---- the function that a model sees --------------------------------------------------------------


def test_gpus_have_our_kernels_and_cpus_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = np.ones((4, 2), np.float32), np.ones((2, 2, 3), np.float32)
    sizes, ran = np.array([1, 2]), []
    monkeypatch.setattr(grouped, "by_tiles", lambda x, *_: ran.append(x.dtype))
    assert jaxptd.grouped_matmul(x, w, sizes).shape == (4, 3)
    assert ran == []
    monkeypatch.setattr(grouped, "_on_gpus", lambda: True)
    jaxptd.grouped_matmul(x, w, sizes)
    jaxptd.grouped_matmul(x, w, sizes, kernel="xla")
    with jax.enable_x64(True):  # no kernel has float64
        doubles = [each.astype(np.float64) for each in (x, w)]
        jaxptd.grouped_matmul(*doubles, sizes)
        with pytest.raises(UserError, match="kernel=triton: it has float32, .* not float64"):
            jaxptd.grouped_matmul(*doubles, sizes, kernel="triton")
    assert ran == [jnp.float32]


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
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    fits = {"x": jnp.ones((4, 2)), "w": jnp.ones((2, 2, 3)), "sizes": jnp.array([1, 2])}
    with pytest.raises(UserError, match=words):
        grouped_matmul(**fits | change)
