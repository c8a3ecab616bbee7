"""Cross-entropy over a vocabulary that is cut over devices.

Letters: B batch, T position, V vocabulary. `[B, T, V]` never exists on one device; what moves is
one maximum and two sums a token.
Source: Shoeybi et al., arXiv 1909.08053, section 3.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.layers.form import TensorParallel


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def vocab_parallel_cross_entropy(
    logits_BTV: Array, targets_BT: Array, form: TensorParallel, vocab_size: int
) -> Array:
    """-log softmax(logits)[target] of each token, `[B, T]`, float32 at least.

    Kept for backward: the logits in their own precision and the logsumexp. Backward is one
    elementwise pass, `softmax - one_hot`; nothing is scattered.

    Args:
        logits_BTV: this device's part of V, perhaps with padding ids at V and beyond.
        targets_BT: ids in [0, vocab_size), the same on every device; others give the logsumexp.
        form: how the vocabulary is cut.
        vocab_size: V without padding.
    """
    return _forward(logits_BTV, targets_BT, form, vocab_size)[0]


def _wide(logits_BTV: Array, form: TensorParallel, vocab_size: int) -> tuple[Array, Array]:
    """Logits in float32 at least, the padding's at minus infinity; and the token ids."""
    ids_V = form.vocab_ids(logits_BTV.shape[-1])
    wide_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    return jnp.where(ids_V < vocab_size, wide_BTV, -jnp.inf), ids_V


def _forward(
    logits_BTV: Array, targets_BT: Array, form: TensorParallel, vocab_size: int
) -> tuple[Array, tuple[Array, Array, Array]]:
    wide_BTV, ids_V = _wide(logits_BTV, form, vocab_size)
    own_BT, exp_BT = _max_and_sum(wide_BTV)
    max_BT = form.vocab_max(own_BT)
    exp_BT = exp_BT * jnp.exp(own_BT - max_BT)
    local_BT = targets_BT - ids_V[0]
    mine_BT = (local_BT >= 0) & (local_BT < ids_V.shape[0]) & (targets_BT < vocab_size)
    index_BT1 = jnp.where(mine_BT, local_BT, 0)[..., None]
    target_BT1 = jnp.take_along_axis(logits_BTV, index_BT1, -1)
    target_BT = jnp.where(mine_BT, target_BT1[..., 0].astype(wide_BTV.dtype), 0)
    exp_BT, target_BT = form.vocab_sum(jnp.stack([exp_BT, target_BT]))
    logsumexp_BT = jnp.log(exp_BT) + max_BT
    return logsumexp_BT - target_BT, (logits_BTV, targets_BT, logsumexp_BT)


def _max_and_sum(x_BTV: Array) -> tuple[Array, Array]:
    """max over V, and the sum of exp(x - max), in one pass over x.

    Minus infinity counts as the least number: two of them differ by no number.
    """
    low, none = jnp.finfo(x_BTV.dtype).min, jnp.zeros((), x_BTV.dtype)

    def join(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        top = jnp.maximum(a[0], b[0])
        return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top)

    parts = (jnp.maximum(x_BTV, low), jnp.ones_like(x_BTV))
    return lax.reduce(parts, (low, none), join, (x_BTV.ndim - 1,))


def _backward(
    form: TensorParallel, vocab_size: int, kept: tuple[Array, Array, Array], d_BT: Array
) -> tuple[Array, None]:
    logits_BTV, targets_BT, logsumexp_BT = kept
    wide_BTV, ids_V = _wide(logits_BTV, form, vocab_size)
    softmax_BTV = jnp.exp(wide_BTV - logsumexp_BT[..., None])
    target_BTV = (ids_V == targets_BT[..., None]) & (ids_V < vocab_size)
    d_BTV = jnp.where(target_BTV, softmax_BTV - 1, softmax_BTV) * d_BT[..., None]
    return d_BTV.astype(logits_BTV.dtype), None


vocab_parallel_cross_entropy.defvjp(_forward, _backward)
