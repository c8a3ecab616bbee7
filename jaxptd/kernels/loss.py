"""The two passes of cross-entropy over the logits, each in one kernel.

Forward computes each row's maximum and sum of exponentials; backward writes the gradient over the
logits. Both are bound by instructions, not by memory, so exp(x - y) is computed as 2 ** (x log2(e)
- y log2(e)): one fused multiply-add, where exp needs the difference first. Rounding y log2(e)
shifts the logarithm of a sum by less than the logarithm's own rounding. Letters: R rows (tokens), V
vocabulary.
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

# Tuned on an H200. Forward, a program reads a row, this many pieces at a time.
_PIECE, _PIECES, _WARPS = 512, 8, 2
_TILE = Tile(1, 2048, 4)
_LEAST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True)
class FusedLoss:
    """Passes over logits `[R, V]` whose columns from `stop` (an int32) on are padding.

    Args:
        interpret: runs the kernels' operations one by one, on any device.
    """

    interpret: bool = False

    def max_and_sum(self, logits_RV: Array, stop: Array) -> tuple[Array, Array]:
        """The maximum of each row and the sum of exp(logit - maximum), in float32.

        Without any column they are the lowest float and 0. Logits below -2e38 are ignored.
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
        """`softmax * d_sum`, less d_target at the target, in the logits' type and memory.

        Args:
            logits_RV: this device's columns.
            stop: how many of them are not padding.
            targets_R: a column of each row; out of range if the target is elsewhere.
            logsumexp_R: logsumexp over the columns of all devices.
            d_sum_R: gradient of logsumexp.
            d_target_R: minus the gradient of the target's logit.
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
    """Reduces one row. Each place of a piece keeps its own maximum until the end."""
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
    # Without padding no column index has to be compared.
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
    """Computes a part of a row. Only the few parts with padding or the target compare columns."""
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
