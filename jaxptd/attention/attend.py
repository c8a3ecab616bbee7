"""The entrance of all attention: from the queries of this device to the keys of all devices.

    o_BTNH = softmax(scale * q_BTNH k_BSNH + bias, over the keys S that a query sees) v_BSNH

One device has all keys. Otherwise the devices of a ring share the sequence, and the strategy of
`context_parallel.py` says which tokens each of them holds and which function brings queries and
keys together.

Letters: B batch, T local query, S local key, N heads, K heads of keys and values, H head size.
"""

import importlib

import jax
from jax import Array, lax

from jaxptd.attention.groups import bias_for, check_distances
from jaxptd.attention.kernel import Kernel, Lengths, Scores
from jaxptd.attention.ring import AttentionInputs, Ring, check_lengths
from jaxptd.collectives import alike
from jaxptd.context_parallel import BLOCKS


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
    exchange = ring.strategy.exchange if devices > 1 else BLOCKS
    module, name = exchange.attend.split(":")
    function = getattr(importlib.import_module(module), name)
    return function(q, k, v, inputs, ring=ring, kernel=kernel, scores=scores)
