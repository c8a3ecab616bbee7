"""LayerNorm and RMSNorm with one kernel forward and one backward.

XLA splits a norm into several kernels (statistics, result; backward, the gradients of x and of w
and b), and each reads its arrays again. Here each array is read or written once. Needs whole tokens
on a device.

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

from jaxptd.collectives import alike
from jaxptd.kernels.tile import Instructions, Tile, TilePlaces, call, load, masked, store
from jaxptd.remat import SAVED_MATMUL_OUT

LONGEST = 2**13  # elements of a row that fit in the registers of the threads that read it
# Warps of 32 threads in backward: eight for each of an H200's 132 processors. Each of their
# programs writes its own sums for w and b.
_THREADS = 1056


@dataclasses.dataclass(frozen=True)
class FusedNorm:
    """A norm over the last dim.

    Args:
        eps: added to the variance.
        centred: whether the mean is subtracted: LayerNorm, not RMSNorm.
        beside: whether to return x as well. If later uses of x read that, the backward kernel adds
            their gradient.
        interpret: runs the kernels' operations one by one, on any device.
    """

    eps: float
    centred: bool
    beside: bool = False
    interpret: bool = False

    def __call__(self, x: Array, w_D: Array, b_D: Array | None = None) -> tuple[Array, ...]:
        """x[..., D] -> y[..., D] of x's type; beside: x and y.

        Statistics are in float32. b is None for a norm without bias.
        """
        x, w_D, *b = alike(x, w_D, *([] if b_D is None else [b_D]))
        return _normalise(x, w_D, b[0] if b else None, self)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normalise(x: Array, w_D: Array, b_D: Array | None, norm: FusedNorm) -> tuple[Array, ...]:
    return _forward(x, w_D, b_D, norm)[0]


def _forward(
    x: Array, w_D: Array, b_D: Array | None, norm: FusedNorm
) -> tuple[tuple[Array, ...], tuple[Array, Array, list[Array]]]:
    """Saves x for backward, which others save in any case, and the statistics of each row."""
    x_RD, (tile, _) = x.reshape(-1, x.shape[-1]), _tiles(x.shape[-1])
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
    return results, (x, w_D, [checkpoint_name(each, SAVED_MATMUL_OUT) for each in statistics])


def _backward(
    norm: FusedNorm, saved: tuple[Array, Array, list[Array]], grads: tuple[Array, ...]
) -> tuple[Array, Array, Array | None]:
    (x, w_D, (scale_R, *mean)), (*residual, dy) = saved, grads
    x_RD, dy_RD, *residual_RD = (each.reshape(-1, x.shape[-1]) for each in (x, dy, *residual))
    rows, size = x_RD.shape
    _, tile = _tiles(size)
    tiles = tile.grid(rows, size)[0]
    programs = min(max(_THREADS // tile.warps, 1), tiles)
    sums_PD = jax.ShapeDtypeStruct((programs, size), jnp.float32)
    dx_RD, *sums = call(
        partial(_backward_kernel, tile=tile),
        (x_RD, dy_RD, residual_RD, w_D, scale_R, mean),
        [x_RD] + [sums_PD] * (1 + norm.centred),
        grid=(programs,),
        warps=tile.warps,
        interpret=norm.interpret,
    )
    dw_D, *db_D = (each.sum(0).astype(w_D.dtype) for each in sums)
    return dx_RD.reshape(x.shape), dw_D, db_D[0] if db_D else None


_normalise.defvjp(_forward, _backward)


def _tiles(size: int) -> tuple[Tile, Tile]:
    """Chooses the tiles of forward and backward: pieces of rows that fit in registers.

    Tuned on an H200 with D of 768 to 8,192: `results/experiments.md`. Backward holds several
    arrays, so each thread holds fewer elements of a row.
    """
    whole = pl.next_power_of_2(size)
    warps = max(whole // 1024, 1)
    forward = Tile(2, min(whole, 256), 1) if size < 2048 else Tile(1, 512, 1)
    return forward, Tile(1, min(whole, max(128 * warps, 256)), warps)


def _forward_kernel(
    x: Any,
    w: Any,
    b: Any,
    y: Any,
    scale: Any,
    mean: Any = None,
    *,
    tile: Tile,
    eps: float,
    run: Instructions,
) -> None:
    """Normalises a tile of rows."""
    size, pieces = x.shape[1], tile.pieces(pl.program_id(0), *x.shape)
    parts = [load(x, each.both) for each in pieces]
    if mean is not None:
        mean_R = sum(parts[1:], parts[0]).sum(1) / size
        store(mean, pieces[0].rows, mean_R)
        parts = [each - mean_R[:, None] for each in parts]
        parts = [masked(each, places.both) for places, each in zip(pieces, parts, strict=True)]
    scale_R = lax.rsqrt(_dot(parts, parts, run) / size + eps)
    store(scale, pieces[0].rows, scale_R)
    for places, each in zip(pieces, parts, strict=True):
        n_RD, w_RD = each * scale_R[:, None], load(w, places.repeated)
        y_RD = n_RD * w_RD if b is None else run.fma(n_RD, w_RD, load(b, places.repeated))
        store(y, places.both, y_RD)


def _dot(a: Sequence[Array], b: Sequence[Array], run: Instructions) -> Array:
    """The dot products of rows, `[R]`, in pieces."""
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = run.fma(x, y, total)
    return total.sum(1)


def _backward_kernel(
    x: Any,
    dy: Any,
    residual: Sequence[Any],
    w: Any,
    scale: Any,
    mean: Sequence[Any],
    dx: Any,
    *sums: Any,
    tile: Tile,
    run: Instructions,
) -> None:
    """Computes the gradient of x in every P-th tile, and sums those of w and b over these tiles.

    With n = (x - mean) * scale and g = dy * w: dx = scale * (g - mean(g) - n * mean(g n)), plus x's
    own gradient if `beside`. RMSNorm omits mean and mean(g). Each tile is read while the previous
    one is computed.
    """
    program, (programs, size) = pl.program_id(0), sums[0].shape
    numbers = [each.numbers for each in tile.pieces(0, *x.shape)]
    weights = [load(w, each)[None] for each in numbers]
    steps = pl.cdiv(tile.grid(*x.shape)[0] - program, programs)

    def places_of(step: Array) -> list[TilePlaces]:
        return tile.pieces(step * programs + program, *x.shape)

    def read(step: Array) -> tuple[list[list[Array]], list[Array]]:
        """Arrays in pieces, in their own type so that few registers hold them, and statistics."""
        pieces = places_of(step)
        arrays = [[load(a, each.both, wide=False) for each in pieces] for a in (x, dy, *residual)]
        return arrays, [load(each, pieces[0].rows)[:, None] for each in (scale, *mean)]

    def add_tile(step: Array, carry: Any) -> Any:
        (dw, *db), (arrays, statistics) = carry
        following = read(jnp.minimum(step + 1, steps - 1))
        x_RD, dy_RD, *residual_RD = [
            [each.astype(jnp.float32) for each in array] for array in arrays
        ]
        n_RD, g_RD = _gradients(x_RD, dy_RD, weights, statistics, size, run)
        for places, each, *more in zip(places_of(step), g_RD, *residual_RD, strict=True):
            scaled = run.fma(each, statistics[0], *more) if residual else each * statistics[0]
            store(dx, places.both, scaled)
        dw = [run.fma(*each) for each in zip(dy_RD, n_RD, dw, strict=True)]
        return [dw, *([a + b for a, b in zip(each, dy_RD, strict=True)] for each in db)], following

    zeros = [[jnp.zeros((tile.rows, tile.width), jnp.float32)] * len(numbers)] * len(sums)
    totals, _ = lax.fori_loop(0, steps, add_tile, (zeros, read(jnp.int32(0))))
    for result, pieces in zip(sums, totals, strict=True):
        for (index, there), each in zip(numbers, pieces, strict=True):
            store(result, ((program, index), there), each.sum(0))


def _gradients(
    x: Sequence[Array],
    dy: Sequence[Array],
    w: Sequence[Array],
    statistics: Sequence[Array],
    size: int,
    run: Instructions,
) -> tuple[list[Array], list[Array]]:
    """The normalised rows in pieces, and the gradients of x divided by `scale`.

    Outside the array dy is 0 and the results are arbitrary.
    """
    scale_R, *mean_R = statistics
    normal = [(each - mean_R[0] if mean_R else each) * scale_R for each in x]
    grads = [dy_RD * w_D for dy_RD, w_D in zip(dy, w, strict=True)]
    by_n_R = -_dot(grads, normal, run)[:, None] / size
    if mean_R:
        mean_g_R = sum(grads[1:], grads[0]).sum(1)[:, None] / size
        grads = [each - mean_g_R for each in grads]
    return normal, [run.fma(n, by_n_R, g) for n, g in zip(normal, grads, strict=True)]
