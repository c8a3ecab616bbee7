"""An MLP's activation with bias and gate, in one kernel forward and one backward.

Backward also sums the bias gradients over rows, so no other kernel reads them again.
Letters: R rows (tokens), G matrices (2 with a gate, else 1), F hidden, P programs along the rows.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxptd.collectives import alike
from jaxptd.kernels.tile import LOG2_E, Instructions, Tile, TilePlaces, call, load, store

# Tuned on an H200: independent tiles, and those that a program adds up for a bias.
_ALONE, _SUMMED = Tile(4, 256, 2), Tile(2, 128, 1)
_PROGRAMS = 512  # along the rows, where gradients of a bias are summed


# x and the instructions -> the activation of x and its derivative.
Slope = Callable[[Array, Instructions], tuple[Array, Array]]


def _sigmoid(x: Array, run: Instructions) -> Array:
    """The sigmoid of `-x log(2)`: 1 / (1 + 2^x)."""
    return run.reciprocal(1 + run.exp2(x))


def gelu_tanh(x: Array, run: Instructions) -> tuple[Array, Array]:
    """x sigmoid(u), with `u = x (c + c a x^2)` by `jaxptd.layers.mlp.gelu_tanh`."""
    c, a, square = (8 / math.pi) ** 0.5, 0.044715, x * x
    s = _sigmoid(x * run.fma(square, -c * a * LOG2_E, -c * LOG2_E), run)
    y = x * s
    return y, run.fma(y * (1 - s), run.fma(square, 3 * c * a, c), s)


def silu(x: Array, run: Instructions) -> tuple[Array, Array]:
    """x sigmoid(x)."""
    s = _sigmoid(x * -LOG2_E, run)
    y = x * s
    return y, run.fma(y, 1 - s, s)


def relu(x: Array, _: Instructions) -> tuple[Array, Array]:
    """The larger of x and 0."""
    return jnp.maximum(x, 0), jnp.where(x > 0, 1.0, 0.0)


# No gelu: Pallas has no error function for Triton.
FUSED: Mapping[str, Slope] = {"gelu-tanh": gelu_tanh, "relu": relu, "silu": silu}


@dataclasses.dataclass(frozen=True)
class FusedActivation:
    """`act(h + b)`; with a gate `act(h_0 + b_0) * (h_1 + b_1)`. Computes in float32.

    Args:
        act: an elementwise function.
        gated: whether h has a gate.
        interpret: runs the kernels' operations one by one, on any device.
    """

    act: Slope
    gated: bool
    interpret: bool = False

    def __call__(self, h: Array, b: Array | None) -> Array:
        """h[..., F], or with a gate `[..., 2, F]` -> `[..., F]` of h's type.

        b is `[F]`, `[2, F]` or None.
        """
        parts = h.shape[-1 - self.gated :]
        h, *biases = alike(h, *([] if b is None else [b]))
        h_RGF = h.reshape(-1, *(parts if self.gated else (1, *parts)))
        y_RF = _activate(h_RGF, [each.reshape(h_RGF.shape[1:]) for each in biases], self)
        return y_RF.reshape(*h.shape[: -len(parts)], parts[-1])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _activate(h_RGF: Array, b_GF: list[Array], fused: FusedActivation) -> Array:
    return _forward(h_RGF, b_GF, fused)[0]


def _forward(
    h_RGF: Array, b_GF: list[Array], fused: FusedActivation
) -> tuple[Array, tuple[Array, list[Array]]]:
    """Saves h for backward, without its bias."""
    rows, _, size = h_RGF.shape
    (y_RF,) = call(
        partial(_forward_kernel, tile=_ALONE, act=fused.act),
        (h_RGF, b_GF),
        [jax.ShapeDtypeStruct((rows, size), h_RGF.dtype)],
        grid=_ALONE.grid(rows, size),
        warps=_ALONE.warps,
        interpret=fused.interpret,
    )
    return y_RF, (h_RGF, b_GF)


def _backward(
    fused: FusedActivation, saved: tuple[Array, list[Array]], dy_RF: Array
) -> tuple[Array, list[Array]]:
    h_RGF, b_GF = saved
    tile = _SUMMED if b_GF else _ALONE
    tiles, columns = tile.grid(*dy_RF.shape)
    programs = min(_PROGRAMS, tiles) if b_GF else tiles
    sums_PGF = jax.ShapeDtypeStruct((programs, *h_RGF.shape[1:]), jnp.float32)
    dh_RGF, *sums = call(
        partial(_backward_kernel, tile=tile, act=fused.act),
        (h_RGF, b_GF, dy_RF),
        [h_RGF] + [sums_PGF] * len(b_GF),
        grid=(programs, columns),
        warps=tile.warps,
        interpret=fused.interpret,
    )
    return dh_RGF, [each.sum(0).astype(b.dtype) for each, b in zip(sums, b_GF, strict=True)]


_activate.defvjp(_forward, _backward)


def _biases(h: Any, b: Any, places: TilePlaces) -> list[Any]:
    """The bias `[1, D]` of each part of h for a tile's columns; empty without a bias."""
    column, there = places.numbers
    return [load(each, ((part, column), there))[None] for each in b for part in range(h.shape[1])]


def _parts(h: Any, biases: list[Any], places: TilePlaces) -> list[Array]:
    """A tile of each part of h, with its bias."""
    parts = [load(h, places.of_part(part)) for part in range(h.shape[1])]
    return [part + each for part, each in zip(parts, biases, strict=True)] if biases else parts


def _forward_kernel(h: Any, b: Any, y: Any, *, tile: Tile, act: Slope, run: Instructions) -> None:
    """Activates a tile."""
    places = tile.places(pl.program_id(0), pl.program_id(1), *y.shape)
    first, *gate = _parts(h, _biases(h, b, places), places)
    store(y, places.both, math.prod(gate, start=act(first, run)[0]))


def _backward_kernel(
    h: Any, b: Any, dy: Any, dh: Any, *sums: Any, tile: Tile, act: Slope, run: Instructions
) -> None:
    """Computes the gradient of h in every P-th tile of rows, and sums it over them."""
    program, column = pl.program_id(0), pl.program_id(1)
    rows, size = dy.shape
    tiles, _ = tile.grid(rows, size)
    programs = sums[0].shape[0] if sums else tiles
    first = tile.places(0, column, rows, size)
    biases = _biases(h, b, first)

    def add_tile(step: Any, sums: list[Array]) -> list[Array]:
        places = tile.places(step * programs + program, column, rows, size)
        x, *gate = _parts(h, biases, places)
        value, slope = act(x, run)
        dy_RF = load(dy, places.both)
        grads = [dy_RF * math.prod(gate, start=slope), *(dy_RF * value for _ in gate)]
        for part, grad in enumerate(grads):
            store(dh, places.of_part(part), grad)
        return [a + grad for a, grad in zip(sums, grads, strict=False)]

    zeros = [jnp.zeros((tile.rows, tile.width), jnp.float32)] * (len(sums) and h.shape[1])
    steps = pl.cdiv(tiles - program, programs)
    totals = add_tile(0, zeros) if tiles == programs else lax.fori_loop(0, steps, add_tile, zeros)
    index, there = first.numbers
    for part, each in enumerate(totals):
        store(sums[0], ((program, part, index), there), each.sum(0))
