"""Costs of a ring: what it sends, computes and saves."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from turns import slow

from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.analysis.device_flops import work_per_device
from jaxptd.analysis.hlo import collectives_from_hlo
from jaxptd.attention.attend import AttentionInputs
from jaxptd.attention.xla import Xla
from jaxptd.costs.collective import Collective, add_up, subtract
from jaxptd.mesh import Layout
from jaxptd.remat import SAVED_ATTENTION_OUT
from tests.attention.test_xla import equations, products, shapes
from tests.test_ring_attention import (
    RINGS,
    TENSOR,
    B,
    Case,
    H,
    T,
    both_ways,
    case,
    moved,
    only_forward,
    trace,
)

WINDOWED_RSA = case("rsa", 4, window=14)
KERNELS = [*RINGS[:3], ("gather", True), ("gather", False)]  # strategies that call a kernel

# ---- what moves ------------------------------------------------------------------------------


def permutes(case: Case, count: int, size: int) -> list[Collective]:
    return [Collective("collective-permute", ("cp",), count, size)] if count else []


@pytest.mark.parametrize("cp", [slow(1), 2, slow(8)])
@pytest.mark.parametrize(("ring", "causal"), RINGS)
def test_each_part_makes_one_round_forward_and_two_backward(ring: Any, causal: bool, cp: int):
    """No other collective runs on any axis. Keys and values share a permute, except in RSA."""
    each = case(ring, cp, causal=causal, rich=True)
    forward = moved(each, only_forward(each), "bfloat16")
    backward = subtract(moved(each, both_ways(each), "bfloat16"), forward)
    hops, block = cp - 1, 2 * B * each.block * each.heads * H  # k and v together
    messages = 2 * hops if ring == "rsa" else hops
    assert forward == permutes(each, messages, hops * block * 2)
    # k and v travel again in bfloat16, their gradients in float32
    assert backward == permutes(each, 2 * messages, hops * block * (2 + 4))


@pytest.mark.parametrize("cp", [slow(1), 2, slow(8)])
@pytest.mark.parametrize("causal", [True, slow(False)])
def test_gathered_keys_move_once_forward_and_backward_again_with_gradients(causal: bool, cp: int):
    """No other collective runs. Keys and values share an all-gather."""
    each = case("gather", cp, causal=causal, rich=True)
    forward = moved(each, only_forward(each), "bfloat16")
    backward = subtract(moved(each, both_ways(each), "bfloat16"), forward)
    whole = 2 * B * T * each.heads * H  # k and v together
    gather, scatter = (
        [Collective(kind, ("cp",), 1, size * whole)] * (cp > 1)
        for kind, size in (("all-gather", 2), ("reduce-scatter", 4))
    )
    assert forward == gather
    assert backward == add_up(gather + scatter)


@pytest.mark.parametrize(
    ("window", "hops"), [slow(1, 0), slow(2, 1), slow(13, 1), (14, 2), slow(26, 3), slow(48, 3)]
)
@pytest.mark.parametrize("ring", ["zigzag", "blockwise", "rsa"])
def test_contiguous_blocks_travel_as_far_as_a_window_reaches(ring: Any, window: int, hops: int):
    """Blocks have 12 tokens; the last hop of gradients leads back to the block's owner."""
    each = case(ring, 4, window=window)
    hops = 3 if ring == "zigzag" else hops
    messages = 3 * hops * (2 if ring == "rsa" else 1)
    size = 3 * hops * 2 * B * each.block * each.heads * H * 4
    assert moved(each, both_ways(each), "float32") == permutes(each, messages, size)


def test_other_axes_move_nothing() -> None:
    each = Case(Layout(dp=2, cp=2, tp=2), rate=0.1, documents=True, heads=2)
    block = 2 * (B // 2) * each.block * (each.heads // 2) * H
    assert moved(each, both_ways(each), "float32") == permutes(each, 3, 3 * block * 4)


@pytest.mark.parametrize("ring", ["zigzag", "gather", slow("blockwise")])
def test_nothing_travels_again_where_remat_keeps_what_attention_names(ring: Any) -> None:
    each = case(ring, 4)
    policy = jax.checkpoint_policies.save_only_these_names(SAVED_ATTENTION_OUT)
    again = both_ways(each, partial(jax.checkpoint, policy=policy))
    assert moved(each, again, "float32") == moved(each, both_ways(each), "float32")


@pytest.mark.parametrize(
    "each",
    [
        case("zigzag", 2),
        case("gather", 4),
        *map(slow, (case("rsa", 2), case("blockwise", 4, window=14), WINDOWED_RSA)),
    ],
    ids=str,
)
def test_the_compiled_program_moves_the_same(each: Case) -> None:
    """XLA does not reuse a forward hop or all-gather in backward: it would save the result."""
    lowered = jax.jit(both_ways(each)).lower(*each.arguments("float32"))
    # leaves out the pass that, on CPU, removes what keeps the two apart
    text = lowered.compile(CPU_OPTIONS).as_text()
    found = add_up(collectives_from_hlo(text, dict(each.mesh.shape)))
    assert found == moved(each, both_ways(each), "float32")


# ---- what is computed, allocated and saved ----------------------------------------------------


def conditionals(jaxpr: Any) -> int:
    return sum(equation.primitive.name == "cond" for equation, _ in equations(jaxpr))


@pytest.mark.parametrize(
    ("ring", "causal", "some"),
    [
        ("zigzag", True, False),
        ("blockwise", True, True),
        ("blockwise", False, False),
        ("gather", True, False),
    ],
)
def test_only_contiguous_parts_are_skipped(ring: Any, causal: bool, some: bool) -> None:
    """Zigzag and gather skip nothing: every device does the same work."""
    each = case(ring, 4, causal=causal)
    assert bool(conditionals(trace(each, only_forward(each)))) == some
    assert bool(conditionals(trace(each, both_ways(each)))) == some


def test_zigzag_computes_half_of_each_other_part() -> None:
    each, full = (case("zigzag", 4, causal=causal, chunk=3) for causal in (True, False))
    heads = B * each.heads * H
    chunks, others = each.block // 3, each.layout.cp - 1
    local, other = chunks * (chunks + 1) // 2 * 9, each.block**2
    forward = 2 * heads  # scores and output
    half = products(trace(each, only_forward(each)))
    assert half == forward * (local + others * other // 2)
    assert products(trace(full, only_forward(full))) == forward * (other + others * other)


@pytest.mark.parametrize(("cp", "chunk"), [(4, 3), slow(2, 512), slow(3, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_gathered_keys_cost_the_products_of_a_ring(causal: bool, cp: int, chunk: int) -> None:
    gathered, ring = (case(kind, cp, causal=causal, chunk=chunk) for kind in ("gather", "zigzag"))
    for run in (only_forward, both_ways):
        assert products(trace(gathered, run(gathered))) == products(trace(ring, run(ring)))


class WholeTiles(Xla):
    """A kernel that takes blocks of any size, as cuDNN's does."""

    def tile(self, side: int) -> int:
        return side

    def within(self, limit: int) -> "WholeTiles":
        return self


@pytest.mark.parametrize("n", [slow(2), 3, slow(8)])
def test_gathering_calls_a_kernel_for_larger_blocks_than_a_ring(n: int, monkeypatch) -> None:
    """Causal: calls it for 2 diagonals, the keys that all see, and n - 1 chunks. Otherwise once."""
    monkeypatch.setattr("tests.test_ring_attention.Xla", WholeTiles)

    def calls(kind: str, causal: bool) -> int:
        each = case(kind, n, causal=causal, chunk=512)
        found = equations(trace(each, only_forward(each)))
        return sum(times for eqn, times in found if eqn.primitive.name == "dot_general") // 2

    assert calls("gather", causal=True) == 2 + 1 + n - 1
    assert calls("zigzag", causal=True) == 1 + 2 * (n - 1)
    assert calls("gather", causal=False) == 1
    assert calls("zigzag", causal=False) == n


@pytest.mark.parametrize("ring", ["zigzag", slow("blockwise"), slow("gather")])
def test_scores_are_of_half_a_block_at_most_where_half_may_be_masked(ring: Any) -> None:
    """Where every query sees every key, they cover a whole block."""
    for causal in (True, False):
        each = case(ring, 4, causal=causal, chunk=512)
        made = shapes(trace(each, both_ways(each)))
        assert any(shape[-2:] == (each.block // 2,) * 2 for shape in made) == causal
        assert any(shape[-2:] == (each.block,) * 2 for shape in made) != causal


def tiles_in_sight(each: Case, side: int) -> np.ndarray:
    """Number of `side` x `side` tiles of scores in which a device's query sees a key: `[C]`."""
    query_CTI = each.order.reshape(each.layout.cp, -1, side)
    distance = query_CTI[:, :, None, None, :, None] - query_CTI[None, None, :, :, None]
    seen = (distance >= 0) & (distance < (each.window or T))
    return seen.any((-1, -2)).sum((1, 2, 3))


@pytest.mark.parametrize("window", [slow(1), slow(6), 7, slow(20), slow(47)])
@pytest.mark.parametrize("ring", ["zigzag", "blockwise", "gather"])
def test_each_device_computes_the_tiles_that_its_window_leaves(ring: Any, window: int) -> None:
    each, side = case(ring, 4, window=window, chunk=3), 3
    work = [
        work_per_device(jax.jit(run(each)).trace(*each.arguments("float32")).jaxpr, each.mesh)
        for run in (only_forward, both_ways)
    ]
    tiles = 2 * B * each.heads * side * H * tiles_in_sight(each, side)
    # forward: scores and output; backward: scores, dp, dv, dq, dk, and do times o
    np.testing.assert_array_equal(work[0].ravel(), tiles * 2 * side)
    np.testing.assert_array_equal((work[1] - work[0]).ravel(), tiles * (5 * side + 1))


@pytest.mark.parametrize(("ring", "causal"), [*KERNELS, RINGS[3]])
def test_only_rsa_makes_whole_rows_of_scores(ring: Any, causal: bool) -> None:
    each = case(ring, 4, causal=causal, rich=True, chunk=4)
    made = shapes(trace(each, both_ways(each)))
    rows = {shape for shape in made if shape[-2:] == (each.block, T)}
    blocks = {shape for shape in made if sum(size >= each.block for size in shape) > 1}
    assert bool(rows) == bool(blocks) == (ring == "rsa")


@pytest.mark.parametrize(("ring", "causal"), KERNELS)
def test_the_inputs_the_output_and_the_logsumexp_are_kept(ring: Any, causal: bool) -> None:
    each = case(ring, 4, causal=causal, rich=True)
    kept: list[tuple[int, ...]] = []

    def body(tokens: AttentionInputs, *qkvdo: Array) -> Array:
        o, back = jax.vjp(each.attention(tokens), *qkvdo[:3])
        kept.extend(x.shape for x in jax.tree.leaves(back))
        return o

    trace(each, each.on_mesh(body, TENSOR))
    tensor = (B, each.block, each.heads, H)
    tokens = [x.shape for x in jax.tree.leaves(each.tokens())]
    assert sorted(kept) == sorted([tensor] * 4 + [tensor[:-1]] + tokens)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        slow(Layout(cp=2)),
        Layout(cp=2, ring="gather"),
        slow(Layout(cp=3, ring="blockwise")),
        Layout(cp=2, ulysses=2),
    ],
    ids=str,
)
def test_scores_between_documents_are_not_computed(layout: Layout) -> None:
    """The first half of each sequence is a document that is not a number: nothing reads it."""
    each = Case(layout, documents=True, heads=2, chunk=4)
    _, q, k, v, do = each.arguments("float32")
    half = each.order >= T // 2
    segment_BCT = jnp.tile(half.astype(jnp.int32).reshape(1, layout.cp, -1), (B, 1, 1))
    tokens = AttentionInputs(segment_BCT, segment_BCT)
    q, k, v, do = (jnp.where(half[:, None, None], x, jnp.nan) for x in (q, k, v, do))
    for x in jax.jit(both_ways(each))(tokens, q, k, v, do)[:4]:
        np.testing.assert_array_equal(np.isfinite(x).all((0, 2, 3)), half)
