"""Latent vectors that devices exchange instead of the keys and values made of them."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.analysis.count import collectives_of
from jaxptd.analysis.device_flops import work_per_device
from jaxptd.attention.attend import AttentionInputs, attend
from jaxptd.attention.xla import Xla
from jaxptd.collectives import as_varying
from jaxptd.costs.collective import Collective, add_up, subtract
from jaxptd.layers.attention.latent import FromLatents, Latents
from jaxptd.mesh import SEQUENCE_AXES, Axis, Layout
from tests.attention.test_kernel import Dropout, difference, mixed, plain
from tests.test_ring_attention import TENSOR, B, Case, H, T

R, NOPE, SHARED, V = 6, 3, 2, 4  # a key has NOPE elements of its own, and SHARED of all heads
VECTORS = P(Axis.DP, SEQUENCE_AXES)  # the same for all heads, so whole along tp
MATRIX = P(None, Axis.TP)
assert NOPE + SHARED == H


@dataclasses.dataclass(frozen=True)
class Expanded(Case):
    """A case whose keys and values are made of latent vectors."""

    def inputs(self) -> list[np.ndarray]:
        """Queries, latent vectors, shared parts of keys, the output's gradient, the matrix."""
        draw = np.random.default_rng(0).standard_normal
        q, latent, shared = draw((B, T, self.heads, H)), draw((B, T, 1, R)), draw((B, T, 1, SHARED))
        do = draw((B, T, self.heads, H))
        do[..., V:] = 0  # values are padded there
        return [q, latent, shared, do, draw((R, self.heads, NOPE + V))]

    def arguments(self, dtype: str) -> tuple[AttentionInputs, *tuple[Array, ...]]:
        *of_tokens, w = (jnp.asarray(x, dtype) for x in self.inputs())
        return self.tokens(), *(x[:, self.order] for x in of_tokens), w

    def own(self, tokens: AttentionInputs, q: Array, latent: Array, shared: Array, w: Array):
        """Attention of this device; latent vectors are for its heads, as the layer hands them."""
        kernel = Xla(Dropout(self.rate, mixed), self.chunk)
        latent, shared = (as_varying(x, [Axis.TP]) for x in (latent, shared))
        inputs = tokens._replace(expansion=FromLatents(w, NOPE, H))
        return attend(q, latent, shared, inputs, ring=self.ring, kernel=kernel, scores=self.scores)

    def mapped(self, body: Callable, outs: Any) -> Callable:
        """Maps `body(tokens, q, latent, shared, do, w)` over the devices' blocks."""
        tokens = AttentionInputs(P(Axis.DP), P(Axis.DP), P(Axis.DP, Axis.TP), P(Axis.TP))
        specs = (tokens, TENSOR, VECTORS, VECTORS, TENSOR, MATRIX)
        return jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=outs, check_vma=True)


def forward(case: Expanded) -> Callable:
    return case.mapped(lambda tokens, q, c, s, do, w: case.own(tokens, q, c, s, w), TENSOR)


def both_ways(case: Expanded) -> Callable:
    """Computes the output, and the gradients of queries, vectors, shared parts and matrix."""

    def body(tokens: AttentionInputs, *arrays: Array) -> tuple[Array, ...]:
        q, latent, shared, do, w = arrays
        o, back = jax.vjp(partial(case.own, tokens), q, latent, shared, w)
        return o, *back(do)

    return case.mapped(body, (TENSOR, TENSOR, VECTORS, VECTORS, MATRIX))


def expected(case: Expanded) -> list[np.ndarray]:
    """What `both_ways` yields, by plain attention to the keys and values of the whole sequence."""
    q, latent, shared, do, w = case.inputs()
    made = np.einsum("BSR,RNH->BSNH", latent[:, :, 0], w)
    k = np.concatenate([made[..., :NOPE], np.repeat(shared, case.heads, 2)], -1)
    v = np.pad(made[..., NOPE:], [(0, 0)] * 3 + [(0, H - V)])
    want = plain(q, k, v, do, case.coordinates(), scores=case.scores, rate=case.rate)
    dmade = np.concatenate([want.dk[..., :NOPE], want.dv[..., :V]], -1)
    dlatent = np.einsum("BSNH,RNH->BSR", dmade, w)[:, :, None]
    dshared = want.dk[..., NOPE:].sum(2, keepdims=True)
    return [want.o, want.dq, dlatent, dshared, np.einsum("BSR,BSNH->RNH", latent[:, :, 0], dmade)]


def case(ring: Any, cp: int, *, rich: bool = False, **choice: Any) -> Expanded:
    sizes = {name: choice.pop(name) for name in ("tp", "ulysses", "dp") if name in choice}
    layout = Layout(cp=cp, ring=ring, **sizes)
    return Expanded(layout, rate=0.1 * rich, documents=rich, **{"heads": 4} | choice)


@pytest.mark.parametrize(
    "case",
    [
        case("zigzag", 3, rich=True),
        slow(case("zigzag", 2)),
        slow(case("zigzag", 4, window=17, rich=True)),
        slow(case("zigzag", 4, causal=False)),
        case("zigzag", 2, bias=True, tp=2, dp=2),
        slow(case("blockwise", 4, rich=True)),
        case("blockwise", 4, window=14, rich=True),
        slow(case("blockwise", 3, bias=True)),
        case("gather", 3, rich=True),
        slow(case("gather", 4, window=14, tp=2)),
        slow(case("gather", 2, causal=False, bias=True)),
        case("zigzag", 2, ulysses=2, rich=True, tp=2),
        slow(case("gather", 2, ulysses=2, rich=True)),
        case("zigzag", 1, ulysses=4, rich=True),
        slow(case("zigzag", 1, ulysses=2, bias=True, window=9)),
    ],
    ids=str,
)
def test_it_gives_the_attention_of_one_device_to_expanded_keys(case: Expanded) -> None:
    """And gradients: one part of those of vectors from each device's heads, of the matrix from
    each device's queries.
    """
    with jax.enable_x64(True):
        found = jax.jit(both_ways(case))(*case.arguments("float64"))
    back = np.argsort(case.order)
    for name, x, want in zip(("o", "dq", "dc", "ds", "dw"), found, expected(case), strict=True):
        x = x if name == "dw" else np.asarray(x)[:, back]
        assert difference(x, want) < 1e-14, name


def moved(case: Case, fn: Callable, dtype: str = "bfloat16") -> list[Collective]:
    """Collectives over cp and ulysses; the others are sums where this test's arrays are whole."""
    traced = jax.make_jaxpr(fn)(*case.arguments(dtype))
    found = collectives_of(traced, case.mesh)
    return [each for each in found if each.kind != "all-reduce"]


@pytest.mark.parametrize("ring", ["zigzag", "blockwise"])
def test_vectors_travel_once_forward_and_once_back_with_their_gradients(ring: Any) -> None:
    """R + SHARED elements of a token, however many heads a device has."""
    for heads, tp in ((4, 1), (4, 2), (8, 2)):
        each, hops = case(ring, 4, heads=heads, tp=tp), 3
        block = B * each.block * (R + SHARED)
        first = moved(each, forward(each))
        later = subtract(moved(each, both_ways(each)), first)
        assert first == [Collective("collective-permute", ("cp",), hops, hops * block * 2)]
        size = hops * block * (2 + 4)
        assert later == [Collective("collective-permute", ("cp",), 2 * hops, size)]


def test_gathered_vectors_move_once_forward_and_twice_back() -> None:
    each, whole = case("gather", 4), B * T * (R + SHARED)
    gathered = Collective("all-gather", ("cp",), 1, 2 * whole)
    first = moved(each, forward(each))
    assert first == [gathered]
    scattered = Collective("reduce-scatter", ("cp",), 1, 4 * whole)
    assert subtract(moved(each, both_ways(each)), first) == add_up([gathered, scattered])


def test_ulysses_gathers_vectors_and_exchanges_queries_and_outputs() -> None:
    each = case("zigzag", 2, ulysses=2)
    queries, vectors = B * T // 4 * H * each.heads, B * T // 2 * (R + SHARED)
    first = moved(each, forward(each))
    exchanged = Collective("all-to-all", ("ulysses",), 2, 2 * 2 * queries)
    gathered = Collective("all-gather", ("ulysses",), 1, 2 * vectors)
    hop = Collective("collective-permute", ("cp",), 1, 2 * vectors)
    assert first == add_up([exchanged, gathered, hop])
    back = Collective("collective-permute", ("cp",), 2, vectors * (2 + 4))
    scattered = Collective("reduce-scatter", ("ulysses",), 1, 2 * vectors)
    assert subtract(moved(each, both_ways(each)), first) == add_up([exchanged, scattered, back])


@pytest.mark.parametrize(
    ("each", "visits"),
    [
        (case("zigzag", 4, heads=2), 4),
        (case("blockwise", 4, window=14), 3),
        slow(case("gather", 4), 4),
        (case("zigzag", 2, ulysses=2), 4),  # twice the tokens in each of 2 visits, half the heads
        slow(case("zigzag", 1, ulysses=2), 2),
    ],
    ids=str,
)
def test_every_device_expands_all_that_it_visits(each: Expanded, visits: int) -> None:
    """Once in forward; in backward once more, and two matmuls for the gradients."""
    heads, tokens = each.heads // each.layout.ulysses, T // each.layout.sequence_shards
    once = visits * 2 * B * tokens * R * heads * (NOPE + V)
    attention = Case(each.layout, window=each.window, heads=each.heads)
    for fn, plain_fn, times in ((forward, plain_forward, 1), (both_ways, plain_both_ways, 4)):
        found, other = work(each, fn(each)), work(attention, plain_fn(attention))
        np.testing.assert_array_equal(found - other, times * once)


def plain_forward(case: Case) -> Callable:
    return case.on_mesh(lambda tokens, q, k, v, do: case.attention(tokens)(q, k, v), TENSOR)


def plain_both_ways(case: Case) -> Callable:
    def body(tokens: AttentionInputs, *qkvdo: Array) -> tuple[Array, ...]:
        o, back = jax.vjp(case.attention(tokens), *qkvdo[:3])
        return o, *back(qkvdo[3])

    return case.on_mesh(body, (TENSOR,) * 4)


def work(case: Case, fn: Callable) -> np.ndarray:
    """FLOPs of matmuls by device."""
    return work_per_device(jax.jit(fn).trace(*case.arguments("float32")).jaxpr, case.mesh).ravel()


@pytest.mark.parametrize("each", [case("zigzag", 4), slow(case("gather", 4))], ids=str)
def test_vectors_are_kept_and_not_the_keys_made_of_them(each: Expanded) -> None:
    kept: list[tuple[int, ...]] = []

    def body(tokens: AttentionInputs, *arrays: Array) -> Array:
        q, latent, shared, _, w = arrays
        o, back = jax.vjp(partial(each.own, tokens), q, latent, shared, w)
        kept.extend(x.shape for x in jax.tree.leaves(back))
        return o

    jax.make_jaxpr(each.mapped(body, TENSOR))(*each.arguments("float32"))
    tensor, vector = (B, each.block, each.heads, H), (B, each.block, 1)
    wanted = [tensor] * 2 + [
        tensor[:-1],
        (*vector, R),
        (*vector, SHARED),
        (R, each.heads, NOPE + V),
    ]
    assert sorted(kept) == sorted(wanted)


# ---- latent vectors that are the keys and values of all heads ------------------------------------


@dataclasses.dataclass(frozen=True)
class Absorbed(Case):
    """A case whose queries meet latent vectors with a shared part beside them, `[B, S, 1, W]`."""

    def inputs(self) -> list[np.ndarray]:
        """Queries, vectors with shared parts, and the output's gradient."""
        draw = np.random.default_rng(0).standard_normal
        q, both, do = (draw((B, T, heads, W)) for heads in (self.heads, 1, self.heads))
        do[..., R:] = 0  # where the output is that of the shared part
        return [q, both, do]

    def arguments(self, dtype: str) -> tuple[AttentionInputs, *tuple[Array, ...]]:
        return self.tokens(), *(jnp.asarray(x[:, self.order], dtype) for x in self.inputs())

    def own(self, tokens: AttentionInputs, q: Array, both: Array) -> Array:
        kernel, expansion = Xla(Dropout(self.rate, mixed), self.chunk), Latents()
        k, v = expansion.split(as_varying(both, [Axis.TP])[None])
        inputs = tokens._replace(expansion=expansion)
        return attend(q, k, v, inputs, ring=self.ring, kernel=kernel, scores=self.scores)

    def mapped(self, body: Callable, outs: Any) -> Callable:
        """Maps `body(tokens, q, vectors, do)` over the devices' blocks."""
        tokens = AttentionInputs(P(Axis.DP), P(Axis.DP), P(Axis.DP, Axis.TP), P(Axis.TP))
        specs = (tokens, TENSOR, VECTORS, TENSOR)
        return jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=outs, check_vma=True)

    def both_ways(self) -> Callable:
        """Computes the output, and the gradients of queries and vectors."""

        def body(tokens: AttentionInputs, q: Array, both: Array, do: Array) -> tuple[Array, ...]:
            o, back = jax.vjp(partial(self.own, tokens), q, both)
            return o, *back(do)

        return self.mapped(body, (TENSOR, TENSOR, VECTORS))


W = R + SHARED


def absorbed(ring: Any, cp: int, **choice: Any) -> Absorbed:
    given = case(ring, cp, **choice)
    fields = {each.name: getattr(given, each.name) for each in dataclasses.fields(Case)}
    return Absorbed(**fields)


@pytest.mark.parametrize(
    "case",
    [
        absorbed("zigzag", 1, rich=True),
        absorbed("zigzag", 3, rich=True),
        slow(absorbed("zigzag", 4, window=17, rich=True)),
        slow(absorbed("zigzag", 4, causal=False)),
        slow(absorbed("zigzag", 2, bias=True, tp=2, dp=2)),
        absorbed("blockwise", 4, window=14, rich=True, tp=2),
        absorbed("gather", 3, rich=True),
        slow(absorbed("gather", 4, window=14, tp=2)),
        absorbed("rsa", 4),
        slow(absorbed("rsa", 2, rich=True, tp=2)),
        absorbed("zigzag", 2, ulysses=2, rich=True, tp=2),
        slow(absorbed("gather", 2, ulysses=2, rich=True)),
        slow(absorbed("rsa", 2, ulysses=2)),
    ],
    ids=str,
)
def test_it_gives_the_attention_of_one_device_to_vectors(case: Absorbed) -> None:
    """A vector is the key and the value of all heads: the gradients of both add up."""
    with jax.enable_x64(True):
        found = jax.jit(case.both_ways())(*case.arguments("float64"))
    q, both, do = case.inputs()
    keys = np.repeat(both, case.heads, 2)
    want = plain(q, keys, keys, do, case.coordinates(), scores=case.scores, rate=case.rate)
    gradient = (want.dk + want.dv).sum(2, keepdims=True)
    back = np.argsort(case.order)
    for name, x, y in zip(("o", "dq", "dc"), found, (want.o, want.dq, gradient), strict=True):
        assert difference(np.asarray(x)[:, back], y) < 1e-14, name


@pytest.mark.parametrize(("ring", "rings"), [("zigzag", 1), ("blockwise", 1), ("rsa", 2)])
def test_one_array_travels_as_keys_and_values(ring: Any, rings: int) -> None:
    """With RSA twice, as it has a ring for scores and another for outputs."""
    each, hops = absorbed(ring, 4), 3
    forward = each.mapped(lambda tokens, q, both, do: each.own(tokens, q, both), TENSOR)
    block, hops = B * each.block * W, hops * rings
    first = moved(each, forward)
    assert first == [Collective("collective-permute", ("cp",), hops, hops * block * 2)]
    later = subtract(moved(each, each.both_ways()), first)
    assert later == [Collective("collective-permute", ("cp",), 2 * hops, hops * block * (2 + 4))]
