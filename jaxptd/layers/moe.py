"""A mixture of experts: a router sends each token to K of E MLPs, and adds up what they return.

    y = sum over a token's experts e of weight_e (act(x gate_e) * (x up_e)) down_e

Each device gathers the tokens of all devices along ep, adds up what its own experts make of them,
and a reduce-scatter brings the sums back. Pairs of a token and an expert are sorted by expert, so
that an expert's rows lie together. Nothing is scattered: sums are read through the inverse
permutation and added in float32, in the same order on every layout.

Letters: B batch, T position, D model, E experts (of a device, in what it holds), K experts of a
token, F hidden units, n tokens of all devices along ep, r rows of a chunk, Q terms of the loss.
Source: Shazeer et al., arXiv 1701.06538; Gale et al., arXiv 2211.15841 (no token is dropped).
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.collectives import alike, as_varying, varying_axes
from jaxptd.config import ModelConfig
from jaxptd.kernels.grouped import GroupedKernel, GroupedPrecision, grouped_matmul
from jaxptd.layers.block import RouterOutput
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.linear import INIT, declare
from jaxptd.layers.mlp import MLP, Elementwise, hidden_units
from jaxptd.layers.tensor_parallel import TensorParallel, block_along, matmul
from jaxptd.mesh import SEQUENCE_AXES, Axis
from jaxptd.params import Initialiser
from jaxptd.parts.moe import MoEShape
from jaxptd.remat import SAVED_CHOICE

TINY = 1e-20  # added to sums that weights are divided by, as published models do


# ---- the router ----------------------------------------------------------------------------------


class Choice(NamedTuple):
    """A router's decisions about this device's tokens; they have no gradient.

    expert_BTK: numbers of the experts. margin_BT: how much better the last of them is than the best
    expert that was not chosen, or the last of their groups than the next, if that is less.
    counted_T: whether each token counts as one of theirs, or None if all do. share_BE: of each
    sequence's choices, the share that each expert has; None without a balance loss.
    """

    expert_BTK: Array
    margin_BT: Array
    counted_T: Array | None
    share_BE: Array | None


class Router(nnx.Module):
    """Chooses experts for each token, in float32 at least.

    Args:
        shape: numbers of experts.
        config: of the model.
        tensor_parallel: how tokens are sharded.
        rngs: random keys of the initial weight.
    """

    w: nnx.Param
    load_bias: nnx.Param
    b: nnx.Param | None = None

    def __init__(
        self,
        shape: MoEShape,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
    ) -> None:
        assert config.moe is not None
        declare(self, shape.router_parameters(tensor_parallel), rngs, w=INIT)
        self.shape, self.moe, self.tensor_parallel = shape, config.moe, tensor_parallel

    def logits(self, x_BTD: Array) -> Array:
        """x, as the residual stream has it -> a number for each of its tokens and each expert."""
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        logits_BTE = jnp.matmul(x_BTD.astype(wide), self.w[...], precision=lax.Precision.HIGHEST)
        return logits_BTE if self.b is None else logits_BTE + self.b[...]

    def scores(self, logits_BTE: Array) -> Array:
        """The scores of experts by which a token's outputs are weighted."""
        if self.moe.score == "softmax":
            return jax.nn.softmax(logits_BTE)
        return jax.nn.sigmoid(logits_BTE)

    @jax.named_scope("router")
    def choose(self, x_BTD: Array, token_info: TokenInfo, layer: Array) -> Choice:
        """x -> the choice for its tokens, which is saved for backward by every policy."""
        score_BTE = self.scores(self.logits(lax.stop_gradient(x_BTD)))
        rank_BTE = lax.stop_gradient(score_BTE + self.load_bias[...])
        rank_BTE, group_margin_BT = self._within_groups(rank_BTE)
        axes, chosen = self.tensor_parallel.axes.tokens, self.shape.chosen
        best, expert_BTK = lax.top_k(rank_BTE, min(chosen + 1, self.shape.experts))
        margin_BT = (
            best[..., chosen - 1] - best[..., -1]
            if chosen < self.shape.experts
            else jnp.full_like(best[..., 0], jnp.inf)
        )
        margin_BT = jnp.minimum(margin_BT, group_margin_BT)
        expert_BTK, given_BTLK = expert_BTK[..., :chosen], token_info.choice_BTLK
        if given_BTLK is not None:
            given_BTK = lax.dynamic_index_in_dim(given_BTLK, layer, 2, keepdims=False)
            given_BTK = block_along(given_BTK, axes, 1)
            expert_BTK = jnp.where(given_BTK >= 0, given_BTK, expert_BTK)
        expert_BTK, counted_T = checkpoint_name(expert_BTK, SAVED_CHOICE), token_info.counted_T
        if counted_T is not None:
            counted_T = block_along(counted_T, axes, 0)
        if not self.moe.balance_loss:
            return Choice(expert_BTK, margin_BT, counted_T, None)
        over = (*SEQUENCE_AXES, *axes)
        load_BE = self.one_hot(expert_BTK, counted_T).sum((1, 2), dtype=jnp.int32)
        load_BE = lax.psum(as_varying(load_BE, over), over).astype(rank_BTE.dtype)
        share_BE = load_BE / load_BE.sum(-1, keepdims=True)
        share_BE = checkpoint_name(share_BE, SAVED_CHOICE)
        return Choice(expert_BTK, margin_BT, counted_T, share_BE)

    def one_hot(self, expert_BTK: Array, counted_T: Array | None) -> Array:
        """True for the experts of each choice of the tokens that count, `[B, T, K, E]`."""
        one_hot_BTKE = expert_BTK[..., None] == jnp.arange(self.shape.experts)
        return one_hot_BTKE if counted_T is None else one_hot_BTKE & counted_T[:, None, None]

    @jax.named_scope("router")
    def weigh(self, x_BTD: Array, choice: Choice) -> tuple[Array, Array]:
        """(factors of the chosen experts' outputs, `[B, T, K]`; terms of the loss, `[B, T, Q]`)."""
        logits_BTE, expert_BTK = self.logits(x_BTD), choice.expert_BTK
        score_BTE = self.scores(logits_BTE)
        chosen_BTKE = self.one_hot(expert_BTK, None)
        weight_BTK = jnp.where(chosen_BTKE, score_BTE[..., None, :], 0).sum(-1)
        if self.moe.normalize:
            weight_BTK /= weight_BTK.sum(-1, keepdims=True) + TINY
        counted_BTKE = self.one_hot(expert_BTK, choice.counted_T)
        weight_BTK = with_counts(weight_BTK * self.moe.scale, self.load_bias[...], counted_BTKE)
        return weight_BTK, self._terms(logits_BTE, score_BTE, choice.share_BE)

    def _within_groups(self, rank_BTE: Array) -> tuple[Array, Array]:
        """(ranks of experts, minus infinity outside the best groups; the margin of these groups).

        The margin is how much better the last of them is than the next: infinite if all are chosen.
        """
        moe = self.moe
        if moe.top_groups == moe.num_groups:
            return rank_BTE, jnp.full_like(rank_BTE[..., 0], jnp.inf)
        rank_BTGE = rank_BTE.reshape(*rank_BTE.shape[:-1], moe.num_groups, -1)
        best = min(2 if moe.group_score == "best_two" else 1, rank_BTGE.shape[-1])
        group_BTG = lax.top_k(rank_BTGE, best)[0].sum(-1)
        chosen = lax.top_k(group_BTG, moe.top_groups)[1]
        inside_BTG = (chosen[..., None] == jnp.arange(moe.num_groups)).any(-2)
        ranked_BTG = lax.top_k(group_BTG, moe.top_groups + 1)[0]
        margin_BT = ranked_BTG[..., -2] - ranked_BTG[..., -1]
        within_BTGE = jnp.where(inside_BTG[..., None], rank_BTGE, -jnp.inf)
        return within_BTGE.reshape(rank_BTE.shape), margin_BT

    def _terms(self, logits_BTE: Array, score_BTE: Array, share_BE: Array | None) -> Array:
        """The terms that each token adds to the loss, before their weights.

        Balance: E times the sum over experts of the share of the sequence's choices that an expert
        has, times the token's score of it. Its mean over tokens is 1 if loads are equal. The share
        is of a sequence, so that no layout changes the loss; it has no gradient.
        """
        terms = []
        if share_BE is not None:
            probability_BTE = score_BTE / score_BTE.sum(-1, keepdims=True)
            terms.append(self.shape.experts * (share_BE[:, None] * probability_BTE).sum(-1))
        if self.moe.z_loss:
            terms.append(jnp.square(jax.nn.logsumexp(logits_BTE, -1)))
        none = jnp.zeros((*logits_BTE.shape[:2], 0), logits_BTE.dtype)
        return jnp.stack(terms, -1) if terms else none


@jax.custom_vjp
def with_counts(weight_BTK: Array, load_bias_E: Array, counted_BTKE: Array) -> Array:
    """The weights. Backward: the gradient of `load_bias` is the number of tokens of each expert.

    As gradients, counts are added up over micro-batches and devices like all others; they are
    integers, exact in float32 up to 2**24.
    """
    return weight_BTK


def _with_counts_fwd(weight_BTK: Array, load_bias_E: Array, counted_BTKE: Array) -> Any:
    return weight_BTK, (load_bias_E, counted_BTKE)


def _with_counts_bwd(saved: tuple[Array, Array], dweight_BTK: Array) -> tuple[Array, Array, None]:
    load_bias_E, counted_BTKE = saved
    counts_E = counted_BTKE.sum((0, 1, 2)).astype(load_bias_E.dtype)
    bias_axes = varying_axes(load_bias_E)
    summed = tuple(sorted(varying_axes(counts_E) - bias_axes))
    counts_E = lax.psum(counts_E, summed) if summed else counts_E
    return dweight_BTK, as_varying(counts_E, sorted(bias_axes)), None


with_counts.defvjp(_with_counts_fwd, _with_counts_bwd)


# ---- the experts of a device ---------------------------------------------------------------------


class Pairs(NamedTuple):
    """The pairs of a token and one of its experts that are this device's, sorted by expert.

    pair_R: number of each pair among all n K, token by token; R is a multiple of the chunk's rows.
    place_nK: the place of each pair in that order; for pairs of other devices after all own ones.
    ends_E: the place after each expert's last pair.
    """

    pair_R: Array
    place_nK: Array
    ends_E: Array

    @classmethod
    def of(cls, expert_nK: Array, experts: int, rows: int) -> "Pairs":
        """Sorts pairs. expert_nK: numbers from this device's first expert on; experts: its E."""
        own = (expert_nK >= 0) & (expert_nK < experts)
        group = jnp.where(own, expert_nK, experts).reshape(-1)
        order = jnp.argsort(group, stable=True).astype(jnp.int32)
        places = (
            jnp.zeros_like(order)
            .at[order]
            .set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
        )
        sizes_E = (group[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
        padded = jnp.pad(order, (0, -order.size % rows))
        return cls(padded, places.reshape(expert_nK.shape), jnp.cumsum(sizes_E))


class Chunk(NamedTuple):
    """Some rows of the sorted pairs.

    token_r: the token of each row. pair_r: its pair. row_nK: the row of each pair, or -1 if it is
    in another chunk or of another device. sizes_E: rows of each expert.
    """

    token_r: Array
    pair_r: Array
    row_nK: Array
    sizes_E: Array

    @classmethod
    def of(cls, pairs: Pairs, number: Array, rows: int) -> "Chunk":
        """Chunk `number` of this many rows."""
        first, chosen = number * rows, pairs.place_nK.shape[1]
        pair_r = lax.dynamic_slice_in_dim(pairs.pair_R, first, rows)
        ends_E = jnp.clip(pairs.ends_E - first, 0, rows)
        row_nK = pairs.place_nK - first
        row_nK = jnp.where((row_nK >= 0) & (row_nK < ends_E[-1]), row_nK, -1)
        return cls(pair_r // chosen, pair_r, row_nK, jnp.diff(ends_E, prepend=0))

    def summed(self, y_rD: Array) -> Array:
        """Rows -> the sum of each token's, `[n, D]`, in float32 at least."""
        wide = y_rD.astype(jnp.promote_types(y_rD.dtype, jnp.float32))
        return self.returned(wide).sum(1)

    def returned(self, y_r: Array) -> Array:
        """Rows `[r, ..]` -> that of each pair `[n, K, ..]`, zero for pairs of other chunks."""
        inside = (self.row_nK >= 0).reshape(*self.row_nK.shape, *[1] * (y_r.ndim - 1))
        return jnp.where(inside, y_r[jnp.maximum(self.row_nK, 0)], 0)


@dataclasses.dataclass(frozen=True)
class Experts:
    """The function that a device's experts compute, chunk after chunk of its pairs.

    Forward and backward run as many chunks as the router filled. Backward computes hidden units
    again, so that no array has the rows of the worst case, in which all tokens choose one device.

    Args:
        act: first matmul's result, of a row `[F]` or `[2, F]` -> its hidden units.
        rows: of a chunk.
        most: rows in the worst case.
        kernel: of `grouped_matmul`.
        precision: of `grouped_matmul`.
    """

    act: Elementwise
    rows: int
    most: int
    kernel: GroupedKernel | None = "xla"
    precision: GroupedPrecision = "native"

    def of_rows(
        self,
        x_rD: Array,
        weight_r: Array,
        up: Array,
        down: Array,
        biases: tuple[Array, ...],
        *,
        sizes_E: Array,
    ) -> Array:
        """x[r, D], up[E, D, ..], down[E, F, D] -> each row's expert times its weight, `[r, D]`.

        biases: `[E, ..]` and `[E, D]`, or none.
        """
        experts, hidden = up.shape[:2]
        multiply = partial(
            grouped_matmul, sizes=sizes_E, kernel=self.kernel, precision=self.precision
        )
        h = multiply(x_rD, up.reshape(experts, hidden, -1).astype(x_rD.dtype))
        for bias in biases[:1]:
            h += rows_of_groups(bias.reshape(experts, -1), x_rD, sizes_E)
        h_rF = self.act(h.reshape(-1, *up.shape[2:]))
        h_rF = (h_rF * weight_r[:, None]).astype(x_rD.dtype)
        y_rD = multiply(h_rF, down.astype(x_rD.dtype))
        for bias_ED in biases[1:]:
            y_rD += (rows_of_groups(bias_ED, x_rD, sizes_E) * weight_r[:, None]).astype(y_rD.dtype)
        return y_rD

    def over_chunks(self, pairs: Pairs, of_chunk: Callable[[Chunk], Any], like: Any) -> Any:
        """Adds up `of_chunk(chunk)` over the chunks that have pairs, in the types of `like`.

        Balanced experts fill one chunk, which is the usual branch: nothing is added up, and no sum
        in float32 is written. Otherwise a loop adds up in float32 at least.
        """

        def one() -> Any:
            return _as_typed(of_chunk(Chunk.of(pairs, jnp.int32(0), self.rows)), like)

        if self.rows >= self.most:
            return one()
        axes = sorted(frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(pairs))))
        trips = -(-pairs.ends_E[-1] // self.rows)

        def trip(carry: tuple[Array, Any]) -> tuple[Array, Any]:
            number, total = carry
            found = of_chunk(Chunk.of(pairs, number, self.rows))
            return number + 1, jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, found)

        def several() -> Any:
            zeros = jax.tree.map(lambda x: as_varying(_wide_zeros(x), axes), like)
            start = as_varying(jnp.int32(0), axes), zeros
            total = lax.while_loop(lambda carry: carry[0] < trips, trip, start)[1]
            return _as_typed(total, like)

        return lax.cond(trips <= 1, one, several)

    def rows_of(self, chunk: Chunk, x_nD: Array, weight_nK: Array) -> tuple[Array, Array]:
        """x and the weight of each row; rows after the last pair have weight zero."""
        exists = jnp.arange(self.rows) < chunk.sizes_E.sum()
        return x_nD[chunk.token_r], jnp.where(exists, weight_nK.reshape(-1)[chunk.pair_r], 0)


@jax.custom_vjp
def rows_of_groups(bias_EF: Array, like_rD: Array, sizes_E: Array) -> Array:
    """The bias of each row's expert, `[r, F]` in the type of `like`; zero after the last expert's.

    Its gradient is the sum of an expert's rows, in float32 at least: a matmul, which adds them in
    a fixed order, where the transpose of a gather would scatter.
    """
    ends_E = jnp.cumsum(sizes_E)
    expert_r = jnp.searchsorted(ends_E, jnp.arange(len(like_rD)), side="right")
    bias_rF = bias_EF.astype(like_rD.dtype)[jnp.minimum(expert_r, len(bias_EF) - 1)]
    return jnp.where((expert_r < len(bias_EF))[:, None], bias_rF, 0)


def _rows_of_groups_fwd(bias_EF: Array, like_rD: Array, sizes_E: Array) -> tuple[Array, Any]:
    return rows_of_groups(bias_EF, like_rD, sizes_E), (bias_EF, like_rD, sizes_E)


def _rows_of_groups_bwd(saved: Any, drows_rF: Array) -> tuple[Array, Array, None]:
    bias_EF, like_rD, sizes_E = saved
    ends_E, row_r = jnp.cumsum(sizes_E), jnp.arange(len(drows_rF))[:, None]
    inside_rE = ((row_r >= ends_E - sizes_E) & (row_r < ends_E)).astype(drows_rF.dtype)
    wide = jnp.promote_types(drows_rF.dtype, jnp.float32)
    dbias_EF = jnp.einsum(
        "rE,rF->EF",
        inside_rE,
        drows_rF,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide,
    )
    return dbias_EF.astype(bias_EF.dtype), jnp.zeros_like(like_rD), None


rows_of_groups.defvjp(_rows_of_groups_fwd, _rows_of_groups_bwd)


def _wide_zeros(x: Array) -> Array:
    return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def _as_typed(found: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), found, like)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def expert_sums(
    experts: Experts,
    x_nD: Array,
    weight_nK: Array,
    up: Array,
    down: Array,
    pairs: Pairs,
    biases: tuple[Array, ...] = (),
) -> Array:
    """Tokens -> for each the sum of what this device's experts make of it, `[n, D]`.

    All arguments vary over the same axes.
    """

    def of_chunk(chunk: Chunk) -> Array:
        rows = experts.rows_of(chunk, x_nD, weight_nK)
        return chunk.summed(experts.of_rows(*rows, up, down, biases, sizes_E=chunk.sizes_E))

    y_nD: Array = experts.over_chunks(pairs, of_chunk, x_nD)
    return y_nD


def _expert_sums_fwd(experts: Experts, *arguments: Any) -> tuple[Array, Any]:
    return expert_sums(experts, *arguments), arguments


def _expert_sums_bwd(experts: Experts, saved: Any, dy_nD: Array) -> tuple[Any, ...]:
    x_nD, weight_nK, up, down, pairs, biases = saved

    def of_chunk(chunk: Chunk) -> tuple[Any, ...]:
        rows = experts.rows_of(chunk, x_nD, weight_nK)
        run = partial(experts.of_rows, sizes_E=chunk.sizes_E)
        _, back = jax.vjp(run, *rows, up, down, biases)
        dx_rD, dweight_r, *dw = back(dy_nD[chunk.token_r])
        return chunk.summed(dx_rD), chunk.returned(dweight_r), *dw

    *found, dbiases = experts.over_chunks(pairs, of_chunk, (x_nD, weight_nK, up, down, biases))
    return *found, None, dbiases


expert_sums.defvjp(_expert_sums_fwd, _expert_sums_bwd)


def own_sums(
    shape: MoEShape,
    experts_of: Callable[[int, int], Experts],
    axes: tuple[Axis, ...],
    weighted: tuple[Array, Array],
    expert_nTK: Array,
    w: tuple[Array, Array, tuple[Array, ...]],
) -> Array:
    """Tokens, of this device or of several -> sums over this device's experts, `[n, T, D]`.

    Args:
        shape: numbers of experts.
        experts_of: makes the device's, for so many rows of a chunk and in the worst case.
        axes: those that split experts.
        weighted: x `[n, T, D]` and weights `[n, T, K]`.
        expert_nTK: numbers of each token's experts.
        w: first and second matrices of this device's experts, and their biases, if they have any.
    """
    (x_nTD, weight_nTK), (up, down, biases) = weighted, w
    tokens, own, chosen = math.prod(x_nTD.shape[:2]), len(up), shape.chosen
    most = tokens * min(chosen, own)
    rows = min(most, math.ceil(shape.chunk * tokens * chosen * own / shape.experts))
    first = lax.axis_index(axes) * own
    pairs = Pairs.of(expert_nTK.reshape(tokens, chosen) - first, own, rows)
    rows_of_tokens = x_nTD.reshape(tokens, -1), weight_nTK.reshape(tokens, chosen)
    arrays, tree = jax.tree.flatten((*rows_of_tokens, up, down, pairs, biases))
    y_nD = expert_sums(experts_of(rows, most), *jax.tree.unflatten(tree, alike(*arrays)))
    return y_nD.reshape(x_nTD.shape)


# ---- the layer -----------------------------------------------------------------------------------


class ExpertWeights(nnx.Module):
    """One matrix `w` for each expert of a device, and a bias `b`, if experts have any."""

    w: nnx.Param
    b: nnx.Param | None = None


class MoE(nnx.Module):
    """A router with its experts, and the MLP that all tokens pass, if there is one.

    Args:
        shape: their sizes.
        config: of the model.
        tensor_parallel: how tokens and matrices are sharded.
        rngs: random keys of the initial weights.
        init_out: initialiser of the second matmuls' weights.
    """

    shared: MLP | None = None
    shared_gate: ExpertWeights | None = None

    def __init__(
        self,
        shape: MoEShape,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        init_out: Initialiser,
    ) -> None:
        own: Any = {"tensor_parallel": tensor_parallel, "rngs": rngs}
        self.router = Router(shape, config, **own)
        self.up, self.down = ExpertWeights(), ExpertWeights()
        declare(self.up, shape.first_parameters(tensor_parallel), rngs, w=INIT)
        declare(self.down, shape.second_parameters(tensor_parallel), rngs, w=init_out)
        if shape.shared:
            self.shared = MLP(shape.shared, config, init_out=init_out, **own)
        if shape.shared_gate:
            self.shared_gate = ExpertWeights()
            declare(self.shared_gate, shape.gate_parameters(tensor_parallel), rngs, w=INIT)
        act, self.looped = config.block.activation, config.block.looped
        # XLA's where it is asked for; else ours where it can run.
        kernel: GroupedKernel | None = None if config.block.kernels == "triton" else "xla"
        how: Any = {"kernel": kernel, "precision": config.products}
        self.experts_of = partial(Experts, hidden_units(act, gated=shape.gated), **how)
        self.shape, self.tensor_parallel = shape, tensor_parallel

    @jax.named_scope("moe")
    def __call__(
        self, x_BTD: Array, token_info: TokenInfo, layer: Array
    ) -> tuple[Array, RouterOutput]:
        """x -> the output, as the residual stream is sharded, and what the router says.

        layer: its number in the model.
        """
        choice = self.router.choose(x_BTD, token_info, layer)
        # Backward weighs and gathers again: what is gathered is ep times as much.
        weighed = jax.checkpoint(MoE._weighed_sums, prevent_cse=not self.looped)
        y_BTD, terms_BTQ = weighed(self, x_BTD, choice)
        if self.shared is not None:
            shared_BTD = self.shared(x_BTD)
            if self.shared_gate is not None:
                shared_BTD *= jax.nn.sigmoid(matmul(x_BTD, self.shared_gate.w[...], 1))
            y_BTD += shared_BTD
        return y_BTD, RouterOutput(terms_BTQ, choice.expert_BTK, choice.margin_BT)

    def _weighed_sums(self, x_BTD: Array, choice: Choice) -> tuple[Array, Array]:
        """(the sum over each token's experts, terms of the loss)."""
        weight_BTK, terms_BTQ = self.router.weigh(x_BTD, choice)
        axes = self.tensor_parallel.axes.experts
        w = self.up.w[...], self.down.w[...], self._biases()
        sums = partial(own_sums, self.shape, self.experts_of, axes)
        visit = self.tensor_parallel.visit_experts
        return visit(sums, x_BTD, weight_BTK, choice.expert_BTK, w), terms_BTQ

    def _biases(self) -> tuple[Array, ...]:
        """The biases of this device's experts; of the second, `[E, D]`, only its slice of D.

        Devices along tp add up their outputs, and with them the slices.
        """
        if self.up.b is None or self.down.b is None:
            return ()
        axes, down_ED = self.tensor_parallel.axes, self.down.b[...]
        if axes.inner not in axes.experts:
            width = down_ED.shape[1]
            whole = jnp.zeros((len(down_ED), width * lax.axis_size(axes.inner)), down_ED.dtype)
            first = lax.axis_index(axes.inner) * width
            whole, down_ED = alike(whole, down_ED)
            whole = lax.dynamic_update_slice_in_dim(whole, down_ED, first, 1)
            down_ED = whole[:, : self.shape.hidden]
        return self.up.b[...], down_ED
