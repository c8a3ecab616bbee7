"""Cross-entropy over a vocabulary that is sharded over devices.

Letters: B batch, T position, V vocabulary. `[B, T, V]` never exists on one device; devices exchange
one maximum and two sums per token.
Source: Shoeybi et al., arXiv 1909.08053, section 3.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.layers.axes import ShardingAxes


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def vocab_parallel_cross_entropy(
    logits_BTV: Array, targets_BT: Array, axes: ShardingAxes, vocab_size: int
) -> Array:
    """-log softmax(logits)[target] of each token, `[B, T]`, float32 at least.

    Saves the logits in their own precision and the logsumexp for backward, which is one elementwise
    pass, `softmax - one_hot`, without a scatter.

    Args:
        logits_BTV: this device's shard of V, perhaps with padding ids at V and beyond.
        targets_BT: ids in [0, vocab_size), the same on every device; other ids give the logsumexp.
        axes: say how the vocabulary is sharded.
        vocab_size: V without padding.
    """
    return _forward(logits_BTV, targets_BT, axes, vocab_size)[0]


def _wide(logits_BTV: Array, axes: ShardingAxes, vocab_size: int) -> tuple[Array, Array]:
    """Logits in float32 at least, minus infinity in the padding, and their token ids."""
    ids_V = axes.vocab_ids(logits_BTV.shape[-1])
    wide_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    return jnp.where(ids_V < vocab_size, wide_BTV, -jnp.inf), ids_V


def _forward(
    logits_BTV: Array, targets_BT: Array, axes: ShardingAxes, vocab_size: int
) -> tuple[Array, tuple[Array, Array, Array]]:
    wide_BTV, ids_V = _wide(logits_BTV, axes, vocab_size)
    local_max_BT, exp_BT = _max_and_sum(wide_BTV)
    max_BT = axes.vocab_max(local_max_BT)
    exp_BT = exp_BT * jnp.exp(local_max_BT - max_BT)
    local_BT = targets_BT - ids_V[0]
    mine_BT = (local_BT >= 0) & (local_BT < ids_V.shape[0]) & (targets_BT < vocab_size)
    index_BT1 = jnp.where(mine_BT, local_BT, 0)[..., None]
    target_BT1 = jnp.take_along_axis(logits_BTV, index_BT1, -1)
    target_BT = jnp.where(mine_BT, target_BT1[..., 0].astype(wide_BTV.dtype), 0)
    exp_BT, target_BT = axes.vocab_sum(jnp.stack([exp_BT, target_BT]))
    logsumexp_BT = jnp.log(exp_BT) + max_BT
    return logsumexp_BT - target_BT, (logits_BTV, targets_BT, logsumexp_BT)


def _max_and_sum(x_BTV: Array) -> tuple[Array, Array]:
    """Maximum over V, and the sum of exp(x - maximum), in one pass over x.

    Minus infinity is replaced by the least finite number: -inf - -inf is NaN.
    """
    low, none = jnp.finfo(x_BTV.dtype).min, jnp.zeros((), x_BTV.dtype)

    def join(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        top = jnp.maximum(a[0], b[0])
        return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top)

    pairs = (jnp.maximum(x_BTV, low), jnp.ones_like(x_BTV))
    return lax.reduce(pairs, (low, none), join, (x_BTV.ndim - 1,))


def _backward(
    axes: ShardingAxes, vocab_size: int, residuals: tuple[Array, Array, Array], d_BT: Array
) -> tuple[Array, None]:
    logits_BTV, targets_BT, logsumexp_BT = residuals
    wide_BTV, ids_V = _wide(logits_BTV, axes, vocab_size)
    softmax_BTV = jnp.exp(wide_BTV - logsumexp_BT[..., None])
    target_BTV = (ids_V == targets_BT[..., None]) & (ids_V < vocab_size)
    d_BTV = jnp.where(target_BTV, softmax_BTV - 1, softmax_BTV) * d_BT[..., None]
    return d_BTV.astype(logits_BTV.dtype), None


vocab_parallel_cross_entropy.defvjp(_forward, _backward)
