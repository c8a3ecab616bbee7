"""Each collective's value and gradient against hand-derived ones."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxptd import collectives
from jaxptd.analysis.count import collectives_of
from jaxptd.collectives import as_varying, varying_axes
from jaxptd.costs.collective import ALL_GATHER
from jaxptd.mesh import Axis, Layout, make_mesh

N = 4
MESH = make_mesh(Layout(dp=2, tp=N))
WHOLE, CUT = P(), P(None, None, Axis.TP)
SEQUENCE = P(None, Axis.TP)


def on_mesh(fn: Callable, ins, outs) -> Callable:
    return jax.jit(jax.shard_map(fn, mesh=MESH, in_specs=ins, out_specs=outs, check_vma=True))


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, DY = array(2, 8, 12), array(2, 8, 12, seed=1)


def copy(x: Array) -> Array:
    return collectives.copy_to(x, Axis.TP)


def reduce(x: Array) -> Array:
    return collectives.reduce_from(x, Axis.TP)


def backward(fn: Callable) -> Callable:
    """(x, dy) -> dx."""
    return lambda x, dy: jax.vjp(fn, x)[1](dy)[0]


# (function, spec of x, spec of y, value, dx of dy): value and dx written by hand, on whole arrays.
# Blocks along tp of a global array are its n shards; a stack of n arrays is one per device.
SPLIT = [
    pytest.param(lambda x: collectives.scatter_to(x, Axis.TP), WHOLE, CUT, X, DY, id="scatter_to"),
    pytest.param(
        lambda x: collectives.gather_from(x, Axis.TP), CUT, WHOLE, X, DY, id="gather_from"
    ),
    pytest.param(
        lambda x: collectives.scatter_to(x, Axis.TP, 1), WHOLE, SEQUENCE, X, DY, id="scatter_T"
    ),
    pytest.param(
        lambda x: collectives.gather_from(x, Axis.TP, 1), SEQUENCE, WHOLE, X, DY, id="gather_T"
    ),
]


@pytest.mark.parametrize(("fn", "spec_x", "spec_y", "y", "dx"), SPLIT)
def test_split_and_gather_keep_the_whole_array(fn, spec_x, spec_y, y, dx) -> None:
    np.testing.assert_array_equal(on_mesh(fn, spec_x, spec_y)(X), y)
    np.testing.assert_array_equal(on_mesh(backward(fn), (spec_x, spec_y), spec_x)(X, DY), dx)


PER_DEVICE = P(Axis.TP)  # leading dim: one array per device along tp


def unstack(fn: Callable) -> Callable:
    """Applies `fn` to this device's array in a stack."""
    return lambda x, *rest: fn(x[0], *(r[0] if r.ndim == x.ndim else r for r in rest))


def test_copy_to_is_the_identity_and_sums_gradients() -> None:
    dy = array(N, 2, 8, seed=2)  # every device uses its copy differently
    y = on_mesh(lambda x: copy(x)[None], WHOLE, PER_DEVICE)(X[0, 0])
    np.testing.assert_array_equal(y, np.broadcast_to(X[0, 0], (N, 12)))
    dx = on_mesh(lambda x, dy: backward(copy)(x, dy[0]), (WHOLE, PER_DEVICE), WHOLE)(
        X[0, :2, :8], dy
    )
    np.testing.assert_allclose(dx, dy.sum(0), rtol=1e-6)


def test_reduce_from_sums_and_hands_gradients_through() -> None:
    x, dy = array(N, 2, 8), array(2, 8, seed=3)
    np.testing.assert_allclose(
        on_mesh(lambda x: reduce(x[0]), PER_DEVICE, WHOLE)(x), x.sum(0), rtol=1e-5, atol=1e-6
    )
    dx = on_mesh(lambda x, dy: backward(reduce)(x[0], dy)[None], (PER_DEVICE, WHOLE), PER_DEVICE)(
        x, dy
    )
    np.testing.assert_array_equal(dx, np.broadcast_to(dy, (N, 2, 8)))


def test_all_gather_of_the_sequence_and_its_reduce_scatter_backward() -> None:
    dy = array(N, 2, 8, 12, seed=4)
    gather = lambda x: collectives.all_gather(x, Axis.TP)  # noqa: E731
    y = on_mesh(lambda x: gather(x)[None], SEQUENCE, PER_DEVICE)(X)
    np.testing.assert_array_equal(y, np.broadcast_to(X, (N, *X.shape)))
    dx = on_mesh(lambda x, dy: backward(gather)(x, dy[0]), (SEQUENCE, PER_DEVICE), SEQUENCE)(X, dy)
    np.testing.assert_allclose(dx, dy.sum(0), rtol=1e-5, atol=1e-6)


def test_reduce_scatter_of_the_sequence_and_its_all_gather_backward() -> None:
    x = array(N, 2, 8, 12)
    scatter = lambda x: collectives.reduce_scatter(x, Axis.TP)  # noqa: E731
    y = on_mesh(lambda x: scatter(x[0]), PER_DEVICE, SEQUENCE)(x)
    np.testing.assert_allclose(y, x.sum(0), rtol=1e-5, atol=1e-6)
    dx = on_mesh(
        lambda x, dy: backward(scatter)(x[0], dy)[None], (PER_DEVICE, SEQUENCE), PER_DEVICE
    )(x, DY)
    np.testing.assert_array_equal(dx, np.broadcast_to(DY, x.shape))


# ---- from device to device ----------------------------------------------------------------------


BOTH = P((Axis.DP, Axis.TP))  # together they form one ring of eight
RINGS = [(Axis.TP, PER_DEVICE, N), ((Axis.DP, Axis.TP), BOTH, 2 * N)]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("by", [1, -1, 3])
@pytest.mark.parametrize(("axis", "spec", "devices"), RINGS)
def test_shift_sends_around_the_ring_and_gradients_back(
    monkeypatch, axis, spec, devices, by, native
):
    """Device i receives what device i - by holds."""
    monkeypatch.setattr(collectives, "permutes_natively", lambda: native)
    x, dy = array(devices, 3), array(devices, 3, seed=5)
    shift = lambda x: collectives.shift(x, axis, by)  # noqa: E731
    np.testing.assert_array_equal(on_mesh(shift, spec, spec)(x), np.roll(x, by, axis=0))
    dx = on_mesh(backward(shift), (spec, spec), spec)(x, dy)
    np.testing.assert_array_equal(dx, np.roll(dy, -by, axis=0))


# On 2 x 4 devices (i, j): the target of each value, and the axes along which values move.
WAYS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "skewed along a row": (lambda i, j: (i, (j - i) % N), ("tp",)),
    "skewed along a column": (lambda i, j: ((i - j) % 2, j), ("dp",)),
    "round both": (lambda i, j: ((i + (j == N - 1)) % 2, (j + 1) % N), ("dp", "tp")),
    "nowhere": (lambda i, j: (i, j), ()),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_permute_by_an_all_gather_is_xlas(way: str) -> None:
    """Values and gradients are equal to the last bit; gathers use only the axes that move."""
    to, axes = WAYS[way]
    pairs = [(N * i + j, N * to(i, j)[0] + to(i, j)[1]) for i in range(2) for j in range(N)]
    x, dy = array(2 * N, 3), array(2 * N, 3, seed=5)
    found = []
    for permute in (collectives.permute, collectives.permute_by_gather):
        move = lambda x, permute=permute: permute(x, (Axis.DP, Axis.TP), pairs)  # noqa: E731
        y, dx = on_mesh(move, BOTH, BOTH), on_mesh(backward(move), (BOTH, BOTH), BOTH)
        found.append((np.asarray(y(x)), np.asarray(dx(x, dy))))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[1][0][[target for _, target in pairs]], x)
    moved = collectives_of(y.trace(x).jaxpr, MESH)
    assert [(c.kind, c.axes) for c in moved] == ([(ALL_GATHER, axes)] if axes else [])


# The source (or target) of the two groups along tp: the same for both, or one for each.
ONES = [pytest.param(lambda: 2, (2, 2), id="2"), pytest.param(lambda: 3, (3, 3), id="3")]
EACH = pytest.param(lambda: 1 + 2 * jax.lax.axis_index(Axis.DP), (1, 3), id="each its own")


def spread_and_summed(x: np.ndarray, numbers: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The numbered device's array on all of its group, and the group's sum on that device."""
    spread, summed = np.zeros_like(x), np.zeros_like(x)
    for group, number in enumerate(numbers):
        group_of, at = slice(group * N, (group + 1) * N), group * N + number
        spread[group_of], summed[at] = x[at], x[group_of].sum(0)
    return spread, summed


@pytest.mark.parametrize(("end", "numbers"), [*ONES, EACH])
def test_broadcast_spreads_and_reduce_to_sums_and_backward_the_other_way(end, numbers) -> None:
    x, dy = array(2 * N, 3), array(2 * N, 3, seed=5)
    (spread, summed), (spread_dy, summed_dy) = (spread_and_summed(a, numbers) for a in (x, dy))
    for one, forward, back in (
        (collectives.broadcast, spread, summed_dy),
        (collectives.reduce_to, summed, spread_dy),
    ):
        move = lambda x, one=one: one(x, Axis.TP, end())  # noqa: E731
        y = on_mesh(move, BOTH, BOTH)(x)
        np.testing.assert_allclose(y, forward, rtol=1e-5, atol=1e-6)
        dx = on_mesh(backward(move), (BOTH, BOTH), BOTH)(x, dy)
        np.testing.assert_allclose(dx, back, rtol=1e-5, atol=1e-6)


def test_as_varying_adds_only_what_is_missing() -> None:
    def body(x: Array) -> Array:
        assert varying_axes(x) == {"dp"}
        y = as_varying(x, [Axis.DP, Axis.TP])
        assert varying_axes(y) == {"dp", "tp"}
        assert as_varying(y, [Axis.TP]) is y
        return y

    on_mesh(body, P(Axis.DP), P((Axis.DP, Axis.TP)))(np.zeros((2, 3), np.float32))


def test_a_block_that_does_not_split_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="does not split over tp=4"):
        on_mesh(lambda x: collectives.local_block(x, Axis.TP, 0), WHOLE, P(Axis.TP))(
            np.zeros((6, 2))
        )
