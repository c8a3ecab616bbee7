"""LayerNorm and RMSNorm in one kernel forward and one backward.

XLA makes several kernels of a norm, and each reads its arrays again: for the statistics and for the
result, backward for the gradient of x and for those of w and b. Here each array is read or written
once. Where a device has all numbers of a token.

Letters: R rows (tokens), D model, P programs that share the rows backward.

Source: Ba et al., arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467 (RMSNorm).
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from jaxptd.attention.kernel import KEPT
from jaxptd.collectives import alike
from jaxptd.kernels.tile import Tile, call, load, store

LONGEST = 2**13  # numbers of a row that fit into the registers of the threads that read it
# Of backward: eight or four for each of an H200's 132 processors, for rows of up to 2,048 numbers
# and for longer ones. Each writes sums for w and b of its own.
_PROGRAMS = (1056, 528)


@dataclasses.dataclass(frozen=True)
class FusedNorm:
    """A norm over the last dim.

    Args:
        eps: added to the variance.
        centred: whether the mean is subtracted: LayerNorm, and not RMSNorm.
        beside: whether x is a result, too. Then x as others use it later is taken from there, and
            the kernel of backward adds the gradient that comes from them.
        interpret: runs the kernels' operations one by one, on any device.
    """

    eps: float
    centred: bool
    beside: bool = False
    interpret: bool = False

    def __call__(self, x: Array, w_D: Array, b_D: Array | None) -> tuple[Array, ...]:
        """x[..., D] -> y[..., D] of x's type; beside: x and y.

        Statistics are in float32. b is None where there is none.
        """
        x, w_D, *b = alike(x, w_D, *([] if b_D is None else [b_D]))
        return _normalise(x, w_D, b[0] if b else None, self)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normalise(x: Array, w_D: Array, b_D: Array | None, norm: FusedNorm) -> tuple[Array, ...]:
    return _forward(x, w_D, b_D, norm)[0]


def _forward(
    x: Array, w_D: Array, b_D: Array | None, norm: FusedNorm
) -> tuple[tuple[Array, ...], tuple[Array, Array, list[Array]]]:
    """Saves x for backward, which others save anyway, and the statistics of each row."""
    x_RD, tile = x.reshape(-1, x.shape[-1]), _tile(x.shape[-1], backward=False)
    one_each = jax.ShapeDtypeStruct(x_RD.shape[:1], jnp.float32)
    y_RD, *statistics = call(
        partial(_forward_kernel, tile=tile, eps=norm.eps),
        (x_RD, w_D, b_D),
        [x_RD] + [one_each] * (1 + norm.centred),
        grid=tile.grid(*x_RD.shape)[:1],
        warps=tile.warps,
        interpret=norm.interpret,
    )
    results = (x,) * norm.beside + (y_RD.reshape(x.shape),)
    return results, (x, w_D, [checkpoint_name(each, KEPT) for each in statistics])


def _backward(
    norm: FusedNorm, saved: tuple[Array, Array, list[Array]], grads: tuple[Array, ...]
) -> tuple[Array, Array, Array | None]:
    (x, w_D, (scale_R, *mean)), (*own, dy) = saved, grads
    x_RD, dy_RD, *own_RD = (each.reshape(-1, x.shape[-1]) for each in (x, dy, *own))
    rows, size = x_RD.shape
    tile = _tile(size, backward=True)
    tiles = tile.grid(rows, size)[0]
    programs = min(_PROGRAMS[tile.width > 2048], tiles)
    sums_PD = jax.ShapeDtypeStruct((programs, size), jnp.float32)
    dx_RD, *sums = call(
        partial(_backward_kernel, tile=tile, steps=pl.cdiv(tiles, programs)),
        (x_RD, dy_RD, own_RD, w_D, scale_R, mean),
        [x_RD] + [sums_PD] * (1 + norm.centred),
        grid=(programs,),
        warps=tile.warps,
        interpret=norm.interpret,
    )
    dw_D, *db_D = (each.sum(0).astype(w_D.dtype) for each in sums)
    return dx_RD.reshape(x.shape), dw_D, db_D[0] if db_D else None


_normalise.defvjp(_forward, _backward)


def _tile(size: int, *, backward: bool) -> Tile:
    """Whole rows, in as few groups of threads as have the registers: one need not wait for others.

    As measured on an H200, with D of 768, 1,600 and 4,096: `docs/performance.md`.
    """
    width, numbers, each = pl.next_power_of_2(size), *((1024, 32) if backward else (2048, 128))
    rows = max(numbers // width, 1 if backward else 2)
    return Tile(rows, width, max(rows * width // (32 * each), 1))


def _forward_kernel(
    x: Any, w: Any, b: Any, y: Any, scale: Any, mean: Any = None, *, tile: Tile, eps: float
) -> None:
    """Normalises a tile."""
    places, size = tile.places(pl.program_id(0), 0, *x.shape), x.shape[1]
    x_RD = load(x, places.both)
    if mean is not None:
        mean_R = x_RD.sum(1) / size
        store(mean, places.rows, mean_R)
        x_RD = jnp.where(places.both[1], x_RD - mean_R[:, None], 0.0)
    scale_R = lax.rsqrt((x_RD * x_RD).sum(1) / size + eps)
    store(scale, places.rows, scale_R)
    y_RD = x_RD * scale_R[:, None] * load(w, places.numbers)[None]
    y_RD = y_RD if b is None else y_RD + load(b, places.numbers)[None]
    store(y, places.both, y_RD)


def _backward_kernel(
    x: Any,
    dy: Any,
    own: Sequence[Any],
    w: Any,
    scale: Any,
    mean: Sequence[Any],
    dx: Any,
    dw: Any,
    db: Any = None,
    *,
    tile: Tile,
    steps: int,
) -> None:
    """The gradient of x in each P-th tile, and their sums of those of w and b.

    With n = (x - mean) * scale and g = dy * w: dx = scale * (g - mean(g) - n * mean(g n)), and its
    own. RMSNorm has neither of the two means that stand alone.
    """
    program, (programs, size) = pl.program_id(0), dw.shape
    numbers = tile.places(0, 0, *x.shape).numbers
    w_D = load(w, numbers)

    def add_tile(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        places = tile.places(step * programs + program, 0, *x.shape)
        x_RD, dy_RD = load(x, places.both), load(dy, places.both)
        scale_R = load(scale, places.rows)
        for each in mean:
            x_RD -= load(each, places.rows)[:, None]
        n_RD, g_RD = x_RD * scale_R[:, None], dy_RD * w_D[None]  # where g is 0, n may be anything
        dx_RD = g_RD - n_RD * ((g_RD * n_RD).sum(1) / size)[:, None]
        dx_RD = dx_RD - (g_RD.sum(1) / size)[:, None] if mean else dx_RD
        dx_RD *= scale_R[:, None]
        for each in own:
            dx_RD += load(each, places.both)
        store(dx, places.both, dx_RD)
        return tuple(a + b for a, b in zip(sums, (dy_RD * n_RD, dy_RD), strict=False))

    results = [dw] if db is None else [dw, db]
    zeros = tuple(jnp.zeros((tile.rows, tile.width), jnp.float32) for _ in results)
    for result, each in zip(results, lax.fori_loop(0, steps, add_tile, zeros), strict=True):
        index, there = numbers
        store(result, ((program, index), there), each.sum(0))
