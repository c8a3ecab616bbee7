"""The two passes of cross-entropy over the logits, each in one kernel.

Forward, the maximum and the sum of exponentials of each row; backward, the gradient, written over
the logits. Both wait for instructions, not for memory, so exp(x - y) is a power of two of x log2(e)
- y log2(e): one multiplication with an addition, where the difference came first. That y log2(e) is
rounded shifts the logarithm of a sum by less than the logarithm's own rounding. Letters: R rows
(tokens), V vocabulary.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxptd.collectives import alike
from jaxptd.kernels.tile import LOG2_E, Instructions, Tile, call, load, store

# As measured on an H200. Forward, a program reads a row, so many pieces of it at a time.
_PIECE, _PIECES, _WARPS = 512, 8, 2
_TILE = Tile(1, 2048, 4)
_LEAST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True)
class FusedLoss:
    """Passes over logits `[R, V]`, of which columns from `stop` on, an int32, are padding.

    Args:
        interpret: runs the kernels' operations one by one, on any device.
    """

    interpret: bool = False

    def max_and_sum(self, logits_RV: Array, stop: Array) -> tuple[Array, Array]:
        """The maximum of each row and the sum of exp(logit - maximum), in float32.

        Without a column they are the least number and 0. A logit below -2e38 counts as none.
        """
        logits_RV, stop = alike(logits_RV, stop)
        one_each = jax.ShapeDtypeStruct(logits_RV.shape[:1], jnp.float32)
        return tuple(
            call(
                _sum_kernel,
                (logits_RV, stop.reshape(1)),
                [one_each] * 2,
                grid=logits_RV.shape[:1],
                warps=_WARPS,
                interpret=self.interpret,
            )
        )

    def gradient(
        self,
        logits_RV: Array,
        stop: Array,
        *,
        targets_R: Array,
        logsumexp_R: Array,
        d_sum_R: Array,
        d_target_R: Array,
    ) -> Array:
        """`softmax * d_sum`, less d_target at the target: of the logits' type, in their place.

        Args:
            logits_RV: this device's columns.
            stop: number of those that are no padding.
            targets_R: a column of each row; others are none.
            logsumexp_R: over the columns of all devices.
            d_sum_R: gradient of the logsumexp.
            d_target_R: minus that of the target's logit.
        """
        inputs = alike(logits_RV, stop.reshape(1), targets_R, logsumexp_R, d_sum_R, d_target_R)
        return call(
            partial(_gradient_kernel, tile=_TILE),
            inputs,
            [logits_RV],
            grid=_TILE.grid(*logits_RV.shape),
            warps=_TILE.warps,
            interpret=self.interpret,
            over={0: 0},
        )[0]


def _sum_kernel(logits: Any, stop: Any, maximum: Any, total: Any, *, run: Instructions) -> None:
    """A row. Each place of a piece has a maximum of its own until the end."""
    row, size = pl.program_id(0), logits.shape[1]
    end = jnp.clip(stop[0], 0, size)

    def add(step: Any, so_far: tuple[Array, Array], *, whole: bool) -> tuple[Array, Array]:
        top, total = so_far
        starts = [(step * _PIECES + number) * _PIECE for number in range(_PIECES)]
        columns = [start + jnp.arange(_PIECE) for start in starts]
        pieces = [
            load(logits, ((row, each), None if whole else each < end), -jnp.inf) for each in columns
        ]
        new = top
        for piece in pieces:
            new = jnp.maximum(new, piece)
        less = _exponent(new) * -1.0
        total *= run.exp2(_exponent(top) + less)
        for piece in pieces:
            total += run.exp2(run.fma(piece, LOG2_E, less))
        return new, total

    state = (jnp.full(_PIECE, _LEAST, jnp.float32), jnp.zeros(_PIECE, jnp.float32))
    # Without padding no number has to be compared.
    full, steps = end // (_PIECE * _PIECES), pl.cdiv(size, _PIECE * _PIECES)
    state = lax.fori_loop(0, full, partial(add, whole=True), state)
    top, sums = lax.fori_loop(full, steps, partial(add, whole=False), state)
    highest = top.max()
    maximum[row] = highest
    total[row] = (sums * run.exp2(_exponent(top) - _exponent(highest))).sum()


def _exponent(x: Array) -> Array:
    """x log2(e), but not minus infinity, whose difference from itself is NaN."""
    return jnp.maximum(x * LOG2_E, _LEAST)


def _gradient_kernel(
    logits: Any,
    stop: Any,
    target: Any,
    logsumexp: Any,
    d_sum: Any,
    d_target: Any,
    d_logits: Any,
    *,
    tile: Tile,
    run: Instructions,
) -> None:
    """A part of a row. Few have padding or a target, so that the others compare no number."""
    row, part = pl.program_id(0), pl.program_id(1)
    places = tile.places(row, part, *logits.shape)
    (_, column), _ = places.both
    less, by = logsumexp[row] * -LOG2_E, d_sum[row]
    softmax = run.exp2(run.fma(load(logits, places.both, -jnp.inf), LOG2_E, less))
    start, hit = part * tile.width, target[row]

    def compared(grad: Array) -> Array:
        grad = jnp.where(column == hit, grad - d_target[row], grad)
        return jnp.where(column < stop[0], grad, 0.0)

    plain = (start + tile.width <= stop[0]) & ((hit < start) | (hit >= start + tile.width))
    store(d_logits, places.both, lax.cond(plain, lambda grad: grad, compared, softmax * by))
