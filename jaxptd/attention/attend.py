"""The entrance of all attention: from the queries of this device to the keys of all devices.

    o_BTNH = softmax(scale * q_BTNH k_BSNH + bias, over the keys S that a query sees) v_BSNH

One device has all keys. Otherwise the devices of a ring share the sequence, and the strategy of
`context_parallel.py` says which tokens each of them holds and which function brings queries and
keys together.

Letters: B batch, T local query, S local key, N heads, K heads of keys and values, H head size.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.groups import bias_for, check_distances
from jaxptd.attention.kernel import Kernel, Lengths, Saved, ScoreCoordinates, Scores
from jaxptd.attention.ring import (
    AttentionInputs,
    AttentionSpec,
    Ring,
    check_lengths,
    pin_to_backward,
)
from jaxptd.collectives import alike
from jaxptd.remat import SAVED_ATTENTION_OUT


def attend(
    q: Array,
    k: Array,
    v: Array,
    inputs: AttentionInputs,
    *,
    ring: Ring,
    kernel: Kernel,
    scores: Scores,
) -> Array:
    """Attention of this device's queries with every device's keys: -> o[B, T, N, H].

    Args:
        q: local queries, `[B, T, N, H]`.
        k: local keys, `[B, S, K, H]`; K divides N, see `attention/kernel.py`. S differs from T if
            they are those of another sequence.
        v: local values, shaped as the keys.
        inputs: their documents, dropout seeds, and a bias of the scores.
        ring: the devices that share the sequence; possibly a single one.
        kernel: attention of a block. RSA computes scores itself and uses the kernel's dropout only.
        scores: their factor, and which keys a query sees.

    Raises:
        ValueError: causal attention of two lengths, or a bias with too few distances.
    """
    devices, lengths = lax.axis_size(ring.axis), Lengths(q.shape[1], k.shape[1])
    check_lengths(lengths, scores)
    q, k, v, *_ = alike(q, k, v, lax.axis_index(ring.axis), *jax.tree.leaves(inputs))
    if inputs.bias_NR is not None:
        check_distances(inputs.bias_NR, devices * max(lengths))
        inputs = inputs._replace(bias_NR=bias_for(q, inputs.bias_NR))
    if devices == 1:
        return _alone(q, k, v, inputs, kernel, scores)
    spec = AttentionSpec(ring, kernel, scores, inputs.bias_NR is not None)
    o: Array = ring.strategy.exchange.attend(q, k, v, inputs, spec)
    return o


# ---- one device: its block has all keys ----------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _alone(
    q: Array, k: Array, v: Array, inputs: AttentionInputs, kernel: Kernel, scores: Scores
) -> Array:
    return _forward(q, k, v, inputs, kernel, scores)[0]


def _forward(
    q: Array, k: Array, v: Array, inputs: AttentionInputs, kernel: Kernel, scores: Scores
) -> tuple[Array, tuple[Saved, AttentionInputs]]:
    o, lse = kernel.fwd(q, k, v, _coordinates(q, k, inputs), scores=scores)
    o, lse = checkpoint_name((o.astype(q.dtype), lse), SAVED_ATTENTION_OUT)
    return o, (Saved(q, k, v, o, lse), inputs)


def _backward(
    kernel: Kernel, scores: Scores, residuals: tuple[Saved, AttentionInputs], do: Array
) -> tuple[Array, Array, Array, AttentionInputs]:
    saved, inputs = residuals
    saved = pin_to_backward(saved)
    # Scores wait for do, or XLA computes them in forward.
    q, do = lax.optimization_barrier((saved.q, do))
    coordinates = _coordinates(q, saved.k, inputs)
    gradients = kernel.bwd(saved._replace(q=q), do, coordinates, scores=scores)
    primals = (q, saved.k, saved.v, inputs.bias_NR)
    dq, dk, dv, bias = jax.tree.map(lambda x, dx: dx.astype(x.dtype), primals, tuple(gradients))
    return dq, dk, dv, AttentionInputs(bias_NR=bias)


def _coordinates(q: Array, k: Array, inputs: AttentionInputs) -> ScoreCoordinates:
    """Sites of all queries and keys."""
    query_T, key_S = (jnp.arange(x.shape[1], dtype=jnp.int32) for x in (q, k))
    query_BT, key_BS = (None if x is None else x[:, 0] for x in inputs[:2])
    return ScoreCoordinates(query_T, key_S, query_BT, key_BS, inputs.seed_BN2, inputs.bias_NR)


_alone.defvjp(_forward, _backward)
