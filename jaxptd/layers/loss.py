"""Cross-entropy over a vocabulary that is sharded over devices.

Letters: B batch, T position, V vocabulary. `[B, T, V]` never exists on one device; devices exchange
one maximum and two sums per token.
Source: Shoeybi et al., arXiv 1909.08053, section 3.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jaxptd.config import Kernels
from jaxptd.kernels.loss import FusedLoss
from jaxptd.layers.tensor_parallel import ShardingAxes, local_numbers


@partial(jax.checkpoint, static_argnums=1, prevent_cse=False)
def soft_cap(logits_BTV: Array, limit: float) -> Array:
    """limit * tanh(logits / limit), between -limit and limit; saves the logits for backward.

    Source: Gemma Team, arXiv 2408.00118, section 2.
    """
    wide = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    return (limit * jnp.tanh(wide / limit)).astype(logits_BTV.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def vocab_parallel_cross_entropy(
    logits_BTV: Array,
    targets_BT: Array,
    axes: ShardingAxes,
    vocab_size: int,
    kernels: Kernels = "xla",
) -> tuple[Array, Array]:
    """-log softmax(logits)[target] of each token, and log sum exp(logits); float32 at least.

    Both are `[B, T]`. The logits, in their own precision, and the logsumexp are saved for backward,
    which is one elementwise pass, `softmax - one_hot`, without a scatter.

    Args:
        logits_BTV: this device's shard of V, perhaps with padding ids at V and beyond.
        targets_BT: ids in [0, vocab_size), the same on every device; other ids give the logsumexp.
        axes: say how the vocabulary is sharded.
        vocab_size: V without padding.
        kernels: run the passes over the logits.
    """
    return _cross_entropy(logits_BTV, targets_BT, axes, vocab_size, kernels)[0]


def _wide(logits_BTV: Array, axes: ShardingAxes, vocab_size: int) -> tuple[Array, Array]:
    """Logits in float32 at least, minus infinity in the padding, and their token ids."""
    ids_V = local_numbers(axes.inner, logits_BTV.shape[-1])
    wide_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    return jnp.where(ids_V < vocab_size, wide_BTV, -jnp.inf), ids_V


Residuals = tuple[Array, Array, Array]


def _forward(
    logits: Any, targets: Any, axes: ShardingAxes, vocab_size: int, kernels: Kernels
) -> tuple[tuple[Array, Array], Residuals]:
    return _cross_entropy(logits.value, targets.value, axes, vocab_size, kernels)


def _cross_entropy(
    logits_BTV: Array, targets_BT: Array, axes: ShardingAxes, vocab_size: int, kernels: Kernels
) -> tuple[tuple[Array, Array], Residuals]:
    wide_BTV, ids_V = _wide(logits_BTV, axes, vocab_size)
    if kernels == "triton":
        logits_RV = logits_BTV.reshape(-1, logits_BTV.shape[-1])
        max_and_sum = FusedLoss().max_and_sum(logits_RV, vocab_size - ids_V[0])
        local_max_BT, exp_BT = (each.reshape(targets_BT.shape) for each in max_and_sum)
    else:
        local_max_BT, exp_BT = _max_and_sum(wide_BTV)
    max_BT = lax.pmax(local_max_BT, axes.inner)
    exp_BT = exp_BT * jnp.exp(local_max_BT - max_BT)
    local_BT = targets_BT - ids_V[0]
    mine_BT = (local_BT >= 0) & (local_BT < ids_V.shape[0]) & (targets_BT < vocab_size)
    index_BT1 = jnp.where(mine_BT, local_BT, 0)[..., None]
    target_BT1 = jnp.take_along_axis(logits_BTV, index_BT1, -1)
    target_BT = jnp.where(mine_BT, target_BT1[..., 0].astype(wide_BTV.dtype), 0)
    exp_BT, target_BT = lax.psum(jnp.stack([exp_BT, target_BT]), axes.inner)
    logsumexp_BT = jnp.log(exp_BT) + max_BT
    loss_BT = logsumexp_BT - target_BT
    return (loss_BT, logsumexp_BT), (logits_BTV, targets_BT, logsumexp_BT)


def _max_and_sum(x_BTV: Array) -> tuple[Array, Array]:
    """Maximum over V, and the sum of exp(x - maximum), in one pass over x.

    Minus infinity is replaced by the least finite number: -inf - -inf is NaN.
    """
    low, none = jnp.finfo(x_BTV.dtype).min, jnp.zeros((), x_BTV.dtype)

    def join(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        higher = a[0] > b[0]
        scale = jnp.exp(-jnp.abs(a[0] - b[0]))  # one exponential, not one for each of the two
        sums = jnp.where(higher, a[1], b[1]) + jnp.where(higher, b[1], a[1]) * scale
        return jnp.maximum(a[0], b[0]), sums

    pairs = (jnp.maximum(x_BTV, low), jnp.ones_like(x_BTV))
    return lax.reduce(pairs, (low, none), join, (x_BTV.ndim - 1,))


def _backward(
    axes: ShardingAxes,
    vocab_size: int,
    kernels: Kernels,
    residuals: Residuals,
    cotangents: tuple[Any, Any],
) -> tuple[Array, None]:
    (logits_BTV, *rows), (d_BT, d_logsumexp_BT) = residuals, cotangents
    used = not isinstance(d_logsumexp_BT, SymbolicZero)
    rows_R = [x.reshape(-1) for x in (*rows, d_BT, *[d_logsumexp_BT] * used)]
    logits_RV = logits_BTV.reshape(-1, logits_BTV.shape[-1])
    way = _by_kernel if kernels == "triton" else _by_loop
    return way(logits_RV, rows_R, axes, vocab_size).reshape(logits_BTV.shape), None


def _by_kernel(
    logits_RV: Array, rows_R: Sequence[Array], axes: ShardingAxes, vocab_size: int
) -> Array:
    targets_R, logsumexp_R, d_R, *d_logsumexp_R = rows_R
    first = local_numbers(axes.inner, logits_RV.shape[-1])[0]
    return FusedLoss().gradient(
        logits_RV,
        vocab_size - first,
        targets_R=targets_R - first,
        logsumexp_R=logsumexp_R,
        d_sum_R=sum(d_logsumexp_R, start=d_R),
        d_target_R=d_R,
    )


def _by_loop(
    logits_RV: Array, rows_R: Sequence[Array], axes: ShardingAxes, vocab_size: int
) -> Array:
    """Writes the gradient over the logits, as XLA does with the carry of a loop.

    XLA would not overwrite the result of cuBLAS, and the logits would be in memory twice.
    """
    count = 2 if len(logits_RV) % 2 == 0 else 1
    size = len(logits_RV) // count

    def differentiate(i: Array, x_RV: Array) -> Array:
        take = partial(lax.dynamic_slice_in_dim, start_index=i * size, slice_size=size)
        wide_RV, ids_V = _wide(take(x_RV), axes, vocab_size)
        targets_R, logsumexp_R, d_R, *d_logsumexp_R = map(take, rows_R)
        softmax_RV = jnp.exp(wide_RV - logsumexp_R[:, None])
        target_RV = (ids_V == targets_R[:, None]) & (ids_V < vocab_size)
        d_RV = jnp.where(target_RV, softmax_RV - 1, softmax_RV) * d_R[:, None]
        for each_R in d_logsumexp_R:
            d_RV += softmax_RV * each_R[:, None]
        return lax.dynamic_update_slice_in_dim(x_RV, d_RV.astype(x_RV.dtype), i * size, 0)

    return lax.fori_loop(0, count, differentiate, logits_RV)


vocab_parallel_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)
