"""LayerNorm and RMSNorm in one kernel forward and one backward, written in Pallas for Triton.

XLA makes several kernels of a norm, and each reads its arrays again: for the statistics and for the
result, backward for the gradient of x and for those of w and b. Here each array is read or written
once. For NVIDIA GPUs, where a device has all numbers of a token.

Letters: R rows (tokens), D model, P programs that share the rows backward.

Source: Ba et al., arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467 (RMSNorm).
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxptd.attention.kernel import KEPT
from jaxptd.collectives import alike

LONGEST = 2**13  # numbers of a row that fit into the registers of the threads that read it
_NUMBERS = 4096  # of each array that a program reads at a time, where a row has fewer
_EACH = 32  # of them that a thread has
# Eight for each of an H200's 132 processors. Each writes sums for w and b of its own.
_PROGRAMS = 1056


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
    x_RD, tile = x.reshape(-1, x.shape[-1]), _Tile.of(x.shape[-1])
    one_each = jax.ShapeDtypeStruct(x_RD.shape[:1], jnp.float32)
    y_RD, *statistics = _call(
        partial(_forward_kernel, tile=tile, eps=norm.eps),
        (x_RD, w_D, b_D),
        [x_RD] + [one_each] * (1 + norm.centred),
        programs=pl.cdiv(len(x_RD), tile.rows),
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
    tile = _Tile.of(size)
    steps = pl.cdiv(rows, tile.rows * _PROGRAMS)
    programs = pl.cdiv(rows, tile.rows * steps)
    sums_PD = jax.ShapeDtypeStruct((programs, size), jnp.float32)
    dx_RD, *sums = _call(
        partial(_backward_kernel, tile=tile, steps=steps),
        (x_RD, dy_RD, own_RD, w_D, scale_R, mean),
        [x_RD] + [sums_PD] * (1 + norm.centred),
        programs=programs,
        warps=tile.warps,
        interpret=norm.interpret,
    )
    dw_D, *db_D = (each.sum(0).astype(w_D.dtype) for each in sums)
    return dx_RD.reshape(x.shape), dw_D, db_D[0] if db_D else None


_normalise.defvjp(_forward, _backward)


class _Places(NamedTuple):
    """Indices of a tile, of its rows and of their numbers, each with which of them there are."""

    both: tuple[Any, Array]
    rows: tuple[Array, Array]
    numbers: tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Neighbouring rows, which a program reads at a time.

    Args:
        rows: number of them.
        width: numbers of each, padded to a power of two.
    """

    rows: int
    width: int

    @classmethod
    def of(cls, size: int) -> Self:
        width = pl.next_power_of_2(size)
        return cls(max(_NUMBERS // width, 1), width)

    @property
    def warps(self) -> int:
        """Groups of 32 threads of a program."""
        return min(max(self.rows * self.width // (32 * _EACH), 4), 32)

    def places(self, number: Any, shape: tuple[int, ...]) -> _Places:
        """The places of a tile in an array of this shape."""
        row, column = number * self.rows + jnp.arange(self.rows), jnp.arange(self.width)
        rows, columns = row < shape[0], column < shape[1]
        both = (row[:, None], column[None]), rows[:, None] & columns[None]
        return _Places(both, (row, rows), (column, columns))


def _call(
    kernel: Any,
    inputs: Any,
    shapes: Sequence[Any],
    *,
    programs: int,
    warps: int,
    interpret: bool,
) -> Any:
    """Runs a kernel, whose results vary over the axes over which its inputs do."""
    like = jax.typeof(inputs[0]).manual_axis_type
    return pl.pallas_call(
        kernel,
        [jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=like) for s in shapes],
        grid=(programs,),
        compiler_params=triton.CompilerParams(num_warps=warps),
        interpret=interpret,
        name=kernel.func.__name__.removeprefix("_"),
    )(*inputs)


def _load(array: Any, places: tuple[Any, Array]) -> Array:
    """Numbers of an array in float32, zeros where there are none."""
    index, there = places
    return triton.load(array.at[index], mask=there, other=0.0).astype(jnp.float32)


def _store(array: Any, places: tuple[Any, Array], values: Array) -> None:
    index, there = places
    triton.store(array.at[index], values.astype(array.dtype), mask=there)


def _forward_kernel(
    x: Any, w: Any, b: Any, y: Any, scale: Any, mean: Any = None, *, tile: _Tile, eps: float
) -> None:
    """Normalises a tile."""
    places, size = tile.places(pl.program_id(0), x.shape), x.shape[1]
    x_RD = _load(x, places.both)
    if mean is not None:
        mean_R = x_RD.sum(1) / size
        _store(mean, places.rows, mean_R)
        x_RD = jnp.where(places.both[1], x_RD - mean_R[:, None], 0.0)
    scale_R = lax.rsqrt((x_RD * x_RD).sum(1) / size + eps)
    _store(scale, places.rows, scale_R)
    y_RD = x_RD * scale_R[:, None] * _load(w, places.numbers)[None]
    y_RD = y_RD if b is None else y_RD + _load(b, places.numbers)[None]
    _store(y, places.both, y_RD)


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
    tile: _Tile,
    steps: int,
) -> None:
    """The gradient of x in some neighbouring tiles, and their sums of those of w and b.

    With n = (x - mean) * scale and g = dy * w: dx = scale * (g - mean(g) - n * mean(g n)), and its
    own. RMSNorm has neither of the two means that stand alone.
    """
    program, size = pl.program_id(0), x.shape[1]
    numbers = tile.places(0, x.shape).numbers
    w_D = _load(w, numbers)

    def add_tile(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        places = tile.places(program * steps + step, x.shape)
        x_RD, dy_RD = _load(x, places.both), _load(dy, places.both)
        scale_R = _load(scale, places.rows)
        for each in mean:
            x_RD = jnp.where(places.both[1], x_RD - _load(each, places.rows)[:, None], 0.0)
        n_RD, g_RD = x_RD * scale_R[:, None], dy_RD * w_D[None]
        dx_RD = g_RD - n_RD * ((g_RD * n_RD).sum(1) / size)[:, None]
        dx_RD = dx_RD - (g_RD.sum(1) / size)[:, None] if mean else dx_RD
        dx_RD *= scale_R[:, None]
        for each in own:
            dx_RD += _load(each, places.both)
        _store(dx, places.both, dx_RD)
        return tuple(a + b for a, b in zip(sums, (dy_RD * n_RD, dy_RD), strict=False))

    results = [dw] if db is None else [dw, db]
    zeros = tuple(jnp.zeros((tile.rows, tile.width), jnp.float32) for _ in results)
    for result, each in zip(results, lax.fori_loop(0, steps, add_tile, zeros), strict=True):
        index, there = numbers
        _store(result, ((program, index), there), each.sum(0))
