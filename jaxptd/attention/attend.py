"""The entrance of all attention: from the queries of this device to the keys of all devices.

    o_BTNH = softmax(scale * q_BTNH k_BSNH + bias, over the keys S that a query sees) v_BSNH

One device has all keys. Otherwise the devices of a ring share the sequence, and the strategy of
`context_parallel.py` says which tokens each of them holds and which function brings queries and
keys together. It also has the orders of tokens, which a `Ring` turns into arrays. Where devices
share heads in attention and tokens elsewhere (`ulysses.py`), heads arrive before and leave after.

Letters: B batch, T local query, S local key, N heads, K heads of keys and values, H head size.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.kernel import (
    Gradients,
    Kernel,
    Lengths,
    Saved,
    ScoreCoordinates,
    Scores,
    by_window,
    check_distances,
    sink_gradient,
    varying_with,
    with_sinks,
)
from jaxptd.attention.ulysses import to_heads, to_tokens
from jaxptd.collectives import Axes, alike, local_block, shift
from jaxptd.context_parallel import STRATEGIES, ContextParallel, RingKind
from jaxptd.remat import SAVED_ATTENTION_OUT


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Expansion:
    """Makes keys and values of the k and v that devices exchange; here they are these themselves.

    A subclass makes them of smaller arrays, so that fewer bytes move, and each device repeats the
    matmuls for the tokens that it visits. It is a pytree of their matrices. k and v are a device's,
    each `[B, S, K, H]` with an H of its own; joined they are one array, `[P, B, S, K, H]`.
    """

    def join(self, k: Array, v: Array) -> Array:
        """The array that moves."""
        return jnp.stack((k, v))

    def split(self, x: Array) -> tuple[Array, Array]:
        """Undoes `join`."""
        k, v = x
        return k, v

    def expand(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Keys and values of all heads."""
        return k, v

    def heads(self, x: Array) -> Array:
        """Keys and values, stacked, of joined arrays: `[P, B, S, K, H]` -> `[2, B, S, N, H]`."""
        return x

    def gradients(self, x: Array, dkv: Array) -> tuple[Array, Any]:
        """Gradients of `heads`: of x, and of the expansion, in the precision of `dkv`."""
        return dkv, self

    def all_tokens(self, k: Array, v: Array, axis: str) -> tuple[Array, Array]:
        """k and v for this device's share of the heads along `axis`, of all tokens there."""
        return self.split(to_heads(self.join(k, v), axis))

    def of_heads(self, axis: str) -> "Expansion":
        """The expansion for this device's share of the heads along `axis`."""
        return self


UNCHANGED = Expansion()


class AttentionInputs(NamedTuple):
    """Documents, dropout seeds and bias; attention knows the tokens' positions itself.

    query_segment_BCT, key_segment_BCS: the document of each token on every device, as in
    `kernel.ScoreCoordinates`, or None. seed_BN2: dropout seeds, or None. bias_NR: of the scores by
    distance, as in `kernel.ScoreCoordinates`, or None. windowed: whether this layer has the window
    of the scores; None: it has. capped: whether it has their cap; None: it has. sink_N: a logit of
    each head beside its scores, or None. expansion: makes keys and values from the k and v that
    devices exchange.
    position_BCT: the position of each token on every device, for queries and keys, or None where it
    follows from the device.
    """

    query_segment_BCT: Array | None = None
    key_segment_BCS: Array | None = None
    seed_BN2: Array | None = None
    bias_NR: Array | None = None
    windowed: Array | None = None
    capped: Array | None = None
    sink_N: Array | None = None
    expansion: Expansion = UNCHANGED
    position_BCT: Array | None = None

    def of_heads(self, axis: str) -> "AttentionInputs":
        """Takes those of this device's share of the heads along `axis`."""
        seed_BN2, bias_NR, sink_N = (
            None if x is None else local_block(x, axis, dim)
            for x, dim in ((self.seed_BN2, 1), (self.bias_NR, 0), (self.sink_N, 0))
        )
        expansion = self.expansion.of_heads(axis)
        return self._replace(seed_BN2=seed_BN2, bias_NR=bias_NR, sink_N=sink_N, expansion=expansion)

    def furthest(self, scores: Scores) -> Scores:
        """The scores of the layer that sees the furthest."""
        return scores if self.windowed is None else scores._replace(window=None)


def check_lengths(lengths: Lengths, scores: Scores) -> None:
    """Raises ValueError for causal attention to the keys of another sequence."""
    if scores.causal and lengths.queries != lengths.keys:
        raise ValueError(
            f"causal attention of {lengths.queries} queries to {lengths.keys} keys of another "
            "sequence: nothing says which keys are before a query; use causal=False"
        )


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices along one or several mesh axes, and which block of a sequence each holds.

    Args:
        axis: the mesh axes.
        kind: the name of the strategy.
        heads: a mesh axis along which devices split each block further, except in attention, where
            they split heads; or None.
        latents: whether latent attention exchanges latent vectors instead of keys and values.
        absorbs: whether it takes scores on latent vectors, also where devices exchange nothing.

    Attributes:
        strategy: the order of tokens, and how queries meet the keys of other devices.

    Raises:
        ValueError: no strategy has the name `kind`.
    """

    axis: Axes
    kind: RingKind = "zigzag"
    heads: str | None = None
    latents: bool = False
    absorbs: bool = False
    strategy: ContextParallel = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in STRATEGIES:
            raise ValueError(f"a ring of kind {self.kind!r}: use one of {', '.join(STRATEGIES)}")
        object.__setattr__(self, "strategy", STRATEGIES[self.kind])

    def shift(self, x: Array, by: int = 1) -> Array:
        """Receives the x of the device `by` places before."""
        return shift(x, self.axis, by)

    def order(self, length: int, devices: int) -> np.ndarray:
        """Positions `[length]` of a sequence's tokens in the order in which the devices hold them.

        Raises:
            ValueError: a zigzag's block has an odd number of tokens.
        """
        split = self.strategy.order.split
        blocks = [split(length // devices, i, devices) for i in range(devices)]
        return np.concatenate([start + np.arange(n) for chunks in blocks for start, n in chunks])

    def positions(self, length: int, device: Array | None = None) -> Array:
        """Positions of the `length` tokens of a device (default: this one), int32."""
        device = lax.axis_index(self.axis) if device is None else device
        chunks = self.strategy.order.split(length, device, lax.axis_size(self.axis))
        return jnp.concatenate([start + jnp.arange(n, dtype=jnp.int32) for start, n in chunks])

    def position(self, index: Array | int, length: int, device: Array) -> Array:
        """Position of number `index` of the `length` tokens of a device."""
        chunks = self.strategy.order.split(length, device, lax.axis_size(self.axis))
        position, before = chunks[0][0] + index, 0
        for (_, size), (start, _) in itertools.pairwise(chunks):
            before += size
            position = jnp.where(index < before, position, start + index - before)
        return position

    def run(self, length: int) -> int:
        """Number of a device's `length` tokens that follow one another without a gap."""
        chunks = self.strategy.order.split(length, 0, lax.axis_size(self.axis))
        return chunks[0][1] if lax.axis_size(self.axis) > 1 else length

    def positions_along(self, axis: str, length: int) -> Array:
        """Positions of this device's `length` tokens where its block is that along `axis` only.

        axis: the ring's first axis; in attention, its other axes shard the block further.
        """
        inner = lax.axis_size(self.axis) // lax.axis_size(axis)
        whole = length * (lax.axis_size(self.heads) if self.heads else 1)
        devices = [lax.axis_index(axis) * inner + i for i in range(inner)]
        position_T = jnp.concatenate([self.positions(whole // inner, i) for i in devices])
        return local_block(position_T, self.heads, 0) if self.heads else position_T

    def by_device(self, x_BCT: Array) -> Array:
        """Splits an array of the whole sequence into one block per device of the ring."""
        return x_BCT.reshape(x_BCT.shape[0], lax.axis_size(self.axis), -1)

    def coordinates(
        self, inputs: AttentionInputs, lengths: Lengths, source: Array
    ) -> ScoreCoordinates:
        """Sites of this device's queries and the keys of device `source`; lengths: of a device."""
        return ScoreCoordinates(
            self.positions(lengths.queries),
            self.positions(lengths.keys, source),
            _of_device(inputs.query_segment_BCT, lax.axis_index(self.axis)),
            _of_device(inputs.key_segment_BCS, source),
            inputs.seed_BN2,
            inputs.bias_NR,
            inputs.windowed,
            inputs.capped,
        )

    def all_coordinates(self, inputs: AttentionInputs, lengths: Lengths) -> ScoreCoordinates:
        """Sites of this device's queries and the keys of all devices, in the devices' order."""
        size = lax.axis_size(self.axis)
        key_S = jnp.asarray(self.order(lengths.keys * size, size), jnp.int32)
        segment = inputs.key_segment_BCS
        every = None if segment is None else segment.reshape(segment.shape[0], -1)
        me, position_BCT = lax.axis_index(self.axis), inputs.position_BCT
        local = self.coordinates(inputs, lengths, me)._replace(key_S=key_S, key_segment_BS=every)
        if position_BCT is None:
            return local
        own_BT = lax.dynamic_index_in_dim(position_BCT, me, 1, keepdims=False)
        return local._replace(query_T=own_BT, key_S=position_BCT.reshape(*own_BT.shape[:1], -1))


def _of_device(segment_BCT: Array | None, device: Array) -> Array | None:
    """One device's documents `[B, T]`, if there are any."""
    if segment_BCT is None:
        return None
    return lax.dynamic_index_in_dim(segment_BCT, device, 1, keepdims=False)


class AttentionSpec(NamedTuple):
    """The arguments of `attend` that are not arrays; whether scores have a bias."""

    ring: Ring
    kernel: Kernel
    scores: Scores
    has_bias: bool = False

    @property
    def has_gap(self) -> bool:
        """True if positions jump within the local block where a window or a bias depends on it."""
        windowed = self.scores.causal and self.scores.window is not None
        return (windowed or self.has_bias) and self.in_chunks

    @property
    def in_chunks(self) -> bool:
        """True if a device's block is two chunks of the sequence."""
        return self.ring.strategy.order.chunks > 1 and lax.axis_size(self.ring.axis) > 1


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
        inputs: their documents, dropout seeds, a bias of the scores, and an expansion of k and v,
            which are then what keys and values are made of.
        ring: the devices that share the sequence; possibly a single one. With `ring.heads` q, k, v
            and o are of this device's share of its block.
        kernel: attention of a block. RSA computes scores itself and uses the kernel's dropout only.
        scores: their factor, and which keys a query sees.

    Raises:
        ValueError: causal attention of two lengths, or a bias with too few distances.
    """
    if ring.heads is not None:
        q, (k, v) = to_heads(q, ring.heads), inputs.expansion.all_tokens(k, v, ring.heads)
        own, whole = inputs.of_heads(ring.heads), dataclasses.replace(ring, heads=None)
        o_BTNH = attend(q, k, v, own, ring=whole, kernel=kernel, scores=scores)
        return to_tokens(o_BTNH, ring.heads)
    devices, lengths = lax.axis_size(ring.axis), Lengths(q.shape[1], k.shape[1])
    check_lengths(lengths, scores)
    q, k, v, *_ = alike(q, k, v, lax.axis_index(ring.axis), *jax.tree.leaves(inputs))
    if inputs.bias_NR is not None:
        check_distances(inputs.bias_NR, devices * max(lengths))
        inputs = inputs._replace(bias_NR=varying_with(q, inputs.bias_NR))
    if inputs.sink_N is not None:
        inputs = inputs._replace(sink_N=varying_with(q, inputs.sink_N))
    expansion = jax.tree.map(partial(varying_with, q), inputs.expansion)
    inputs = inputs._replace(expansion=expansion)
    spec = AttentionSpec(ring, kernel, scores, inputs.bias_NR is not None)
    if inputs.position_BCT is not None and not ring.strategy.exchange.any_order:
        raise ValueError(f"a ring of kind {ring.kind!r} has its own positions; use gather")
    # A device that expands latent vectors does so as a ring does its local block.
    if devices == 1 and not jax.tree.leaves(expansion):
        k, v = (k, v) if expansion == UNCHANGED else expansion.expand(k, v)
        return _alone(q, k, v, inputs, spec)
    spec = spec._replace(kernel=kernel.within(_at_once(max(lengths), scores)))
    o: Array = ring.strategy.exchange.attend(q, k, v, inputs, spec)
    return o


def _at_once(length: int, scores: Scores) -> int:
    """The most tokens in one matmul of scores, out of a device's `length`, where devices exchange.

    For causal attention this is half a block: half of the local block's scores are masked, and a
    whole block's scores would be most of a ring's memory. Where every query sees every key, halves
    would only cost a second accumulation.
    """
    return -(-length // 2) if scores.causal else length


def pin_to_backward(residuals: Any) -> Any:
    """Puts a barrier on all residuals at the start of a backward pass.

    Without it XLA would start backward's first hop in forward, or find that forward made the same
    hop, and keep the received block until backward.
    """
    return lax.optimization_barrier(residuals)


# ---- attention that saves no scores --------------------------------------------------------------

Attention = Callable[[Array, Array, Array, AttentionInputs, AttentionSpec], Array]


def recomputing(forward: Callable[..., Any], backward: Callable[..., Any]) -> Attention:
    """Makes attention that saves each row's output and logsumexp, and computes scores again.

    It adds what all such attention has in common: sinks, names for what remat saves, barriers that
    keep backward's work in backward, and the precision of gradients.

    Args:
        forward: (q, k, v, inputs, spec) -> the output and the logsumexp of whole rows.
        backward: (saved, gradient of the output, inputs, spec) -> gradients of q, k, v and the
            bias, `Gradients`, and of the expansion. It need not know of sinks, see
            `kernel.with_sinks`.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(4,))
    def attention(
        q: Array, k: Array, v: Array, inputs: AttentionInputs, spec: AttentionSpec
    ) -> Array:
        return save(q, k, v, inputs, spec)[0]

    def save(
        q: Array, k: Array, v: Array, inputs: AttentionInputs, spec: AttentionSpec
    ) -> tuple[Array, tuple[Saved, AttentionInputs]]:
        o, lse = forward(q, k, v, inputs, spec)
        if inputs.sink_N is not None:
            o, lse = with_sinks(o, lse, inputs.sink_N)
        o, lse = checkpoint_name((o.astype(q.dtype), lse), SAVED_ATTENTION_OUT)
        return o, (Saved(q, k, v, o, lse), inputs)

    def restore(
        spec: AttentionSpec, residuals: tuple[Saved, AttentionInputs], do: Array
    ) -> tuple[Array, Array, Array, AttentionInputs]:
        saved, inputs = residuals
        saved = pin_to_backward(saved)
        # Scores wait for do, or XLA would compute them in forward; keys may move earlier.
        q, do = lax.optimization_barrier((saved.q, do))
        saved = saved._replace(q=q)
        gradients, expansion = backward(saved, do, inputs, spec)
        primals = (saved.q, saved.k, saved.v, inputs.bias_NR, inputs.expansion)
        found = jax.tree.map(lambda x, dx: dx.astype(x.dtype), primals, (*gradients, expansion))
        dq, dk, dv, bias, expansion = found
        sink = None if inputs.sink_N is None else sink_gradient(saved, do, inputs.sink_N)
        return dq, dk, dv, AttentionInputs(bias_NR=bias, sink_N=sink, expansion=expansion)

    attention.defvjp(save, restore)
    return attention


# ---- one device: its block has all keys ----------------------------------------------------------


def _forward(
    q: Array, k: Array, v: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Array, Array]:
    fwd = partial(spec.kernel.fwd, q, k, v, _coordinates(q, k, inputs))
    return by_window(inputs.windowed, spec.scores, lambda scores: fwd(scores=scores))


def _backward(
    saved: Saved, do: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Gradients, Expansion]:
    bwd = partial(spec.kernel.bwd, saved, do, _coordinates(saved.q, saved.k, inputs))
    gradients = by_window(inputs.windowed, spec.scores, lambda scores: bwd(scores=scores))
    return gradients, inputs.expansion


def _coordinates(q: Array, k: Array, inputs: AttentionInputs) -> ScoreCoordinates:
    """Sites of all queries and keys."""
    query_T, key_S = (jnp.arange(x.shape[1], dtype=jnp.int32) for x in (q, k))
    query_BT, key_BS = (None if x is None else x[:, 0] for x in inputs[:2])
    others = inputs.seed_BN2, inputs.bias_NR
    return ScoreCoordinates(query_T, key_S, query_BT, key_BS, *others, capped=inputs.capped)


_alone = recomputing(_forward, _backward)
