"""`TensorParallel`, the interface through which layers see tensor parallelism.

A layer never names a mesh axis. It asks `tensor_parallel.axes` for specs and for the numbers of its
tokens, hidden units, heads and token ids, and `tensor_parallel` for matmuls, look-ups and
attention. `megatron.py` (1D) and `grid.py` (2D) implement it; `for_layout.py` chooses one for a
layout.

`x` is an activation as the residual stream has it, `h` one between the two matmuls of a pair, where
heads or the MLP's hidden units are sharded. `w` and `table` are this device's blocks.
Letters: B batch, T query position, D model, F hidden, N heads, H head size, V vocabulary.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxptd import collectives
from jaxptd.attention.attend import AttentionInputs, Ring
from jaxptd.attention.kernel import Kernel, Scores
from jaxptd.collectives import Axes, after, alike
from jaxptd.matmul.precision import BlockMatmul, block_matmul
from jaxptd.mesh import SEQUENCE_AXES, Axis
from jaxptd.parts.parameters import Sharding
from jaxptd.parts.specs import Specs
from jaxptd.remat import SAVED_MATMUL_IN, SAVED_MATMUL_OUT


@dataclasses.dataclass(frozen=True)
class ShardingAxes(Specs):
    """The mesh axes of each dim, and the blocks and sums that a device computes with them."""

    # ---- dims between the matmuls of a pair ----

    def gather(self, h: Array, dim: int) -> Array:
        """Gathers `dim` of h from all devices along `inner`. Partner: `scatter`."""
        return collectives.gather_from(h, self.inner, dim)

    def scatter(self, h: Array, dim: int) -> Array:
        """Takes this device's block of `dim` from a replicated h. Partner: `gather`."""
        return collectives.scatter_to(h, self.inner, dim)

    def local_heads(self, size: int) -> Array:
        """Numbers of the `size` heads of which this device holds all or a slice, int32."""
        return local_numbers(self.inner if self.head_dim == 0 else None, size)

    def sum_over_head(self, s: Array) -> Array:
        """Sum over the shards of H, where each device has a slice of every head."""
        return lax.psum(s, self.head_slices) if self.head_slices else s

    def sum_over_tokens(self, s: Array) -> Array:
        """Sum over the shards of T that the logits' tokens do not have."""
        axes = tuple(axis for axis in self.tokens if axis not in self.logit_tokens)
        return lax.psum(s, axes) if axes else s

    @property
    def sequence(self) -> tuple[Axis, ...]:
        """The axes that shard the logits' tokens."""
        return (*SEQUENCE_AXES, *self.logit_tokens)

    def sum_over_sequence(self, s: Array) -> Array:
        """Sum over the devices that share the logits' tokens of a sequence."""
        return lax.psum(s, self.sequence)

    def sequence_devices(self) -> int:
        """Number of devices that share the logits' tokens of a sequence."""
        return math.prod(lax.axis_size(axis) for axis in self.sequence)

    def for_heads(self, x: Array) -> Array:
        """x[B, T, ..] of the stream's tokens -> of the logits' tokens, for each device's heads.

        Backward adds up the gradients of all heads.
        """
        for axis in self.tokens:
            x = x if axis in self.logit_tokens else collectives.all_gather(x, axis, 1)
        return collectives.as_varying(x, [self.inner])

    def sum_over_hidden(self, s: Array) -> Array:
        """Sum over the shards of D."""
        return lax.psum(s, self.hidden) if self.hidden else s

    def local_head_numbers(self, size: int) -> Array:
        """Indices, among the H elements of a head, of the `size` that this device holds, int32."""
        return local_numbers(self.head_slices, size)

    def own_kv_heads(self, kv: Array, head_size: int) -> Array:
        """kv[.., K, H/inner] -> [.., K/inner or 1, H]: the kv heads of this device's query heads.

        Used if kv heads do not split over the devices. Each device computes a slice of every head,
        and all gather the slices.

        Args:
            kv: keys or values.
            head_size: H without padding.
        """
        heads, devices = kv.shape[-2], lax.axis_size(self.inner)
        gathered = collectives.all_gather(kv, self.inner, kv.ndim - 1)[..., :head_size]
        first = lax.axis_index(self.inner) * heads // devices
        return lax.dynamic_slice_in_dim(gathered, first, max(1, heads // devices), kv.ndim - 2)

    # ---- hidden units of the residual stream ----

    def local_hidden(self, size: int) -> Array:
        """Numbers of this device's `size` hidden units among the D, int32."""
        return local_numbers(self.hidden, size)

    # ---- images ----

    def local_images(self, x_B: Array) -> Array:
        """This device's block of a value per image `[B, ..]`.

        `axes.tokens` shard a residual stream `[1, B T, D]`, so that each device has whole images.
        """
        return block_along(x_B, self.tokens, 0)

    def gather_images(self, x_b: Array) -> Array:
        """Gathers a value per image from all devices. Undoes `local_images`."""
        for axis in reversed(self.tokens):
            x_b = collectives.all_gather(x_b, axis, 0)
        return x_b

    def logit_images(self, x_B: Array) -> Array:
        """`local_images` of the images between the matmuls of a pair."""
        return block_along(x_B, self.logit_tokens, 0)


def local_numbers(axis: Axes | None, size: int) -> Array:
    """Global numbers of this device's block of `size`, with equal blocks along `axis`, int32."""
    if axis is None:
        return jnp.arange(size, dtype=jnp.int32)
    return lax.axis_index(axis) * size + local_numbers(None, size)


def local_rows(table: Array, ids: Array, axis: Axis) -> Array:
    """Rows `ids` of a table sharded over `axis`; zeros for the rows of other devices."""
    local = ids - local_numbers(axis, table.shape[0])[0]
    mine = (local >= 0) & (local < table.shape[0])
    return jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)


def block_along(x: Array, axes: Sequence[Axis], dim: int) -> Array:
    """This device's block of `dim` of x, sharded over several axes, one after the other."""
    for axis in axes:
        x = collectives.local_block(x, axis, dim)
    return x


# ---- matmuls -------------------------------------------------------------------------------------

Matmul = Callable[[Array, Array, int], Array]  # as `matmul`
Factors = tuple[Array, Array]  # of a matmul
# (tokens and their weights, numbers of their experts, matrices of experts) -> sums of the tokens
ExpertSums = Callable[[tuple[Array, Array], Array, Any], Array]


class MatmulPrecision(NamedTuple):
    """The functions that multiply a block's matrices.

    Args:
        matmul: multiplies whole operands, as `matmul`.
        block_matmul: multiplies two blocks of a matmul that several devices share.
        apart: whether matrices that multiply the same x have separate matmuls. No copies then split
            their results and join their gradients, but each has its own gradient of x.
    """

    matmul: Matmul
    block_matmul: BlockMatmul
    apart: bool = True


class PackedWeight(NamedTuple):
    """The weight and bias of a first matmul, for one matrix or several.

    Args:
        w: this device's block, `[D, *out]`.
        b: this device's block of the bias, `[*out]`, or None.
        parts: whether the first dim of `out` numbers separate matrices.
    """

    w: Array
    b: Array | None = None
    parts: bool = False

    def with_biases(self, products: Sequence[Array]) -> list[Array]:
        """Adds the bias to each matrix's product: -> h, which is what is saved for backward."""
        biases: Sequence[Array | None] = [self.b] * len(products)
        if self.b is not None and self.parts:
            # Typed as h before they are split, so that their gradient is one sum over devices.
            biases = separated(alike(products[0], self.b)[1], 0)
        sums = (h if b is None else add_bias(h, b) for h, b in zip(products, biases, strict=True))
        return [checkpoint_name(h, SAVED_MATMUL_OUT) for h in sums]


@dataclasses.dataclass(frozen=True)
class TensorParallel(Sharding, abc.ABC):
    """One way to shard matrices and the activations between them.

    Args:
        axes: which mesh axis shards which dim.
        ring: the devices over which the sequence of q, k and v is sharded.
    """

    axes: ShardingAxes
    ring: Ring

    # ---- matmuls ----

    @abc.abstractmethod
    def column_parallel(self, x: Array, weights: Sequence[PackedWeight]) -> list[Array]:
        """First matmul of a pair: x -> h of every matrix with its bias, for the logits' tokens.

        x is gathered once for all of them.
        """

    @abc.abstractmethod
    def row_parallel(
        self, h: Array, w: Array, shard_dim: int, beside: Factors | None = None
    ) -> Array:
        """Second matmul of a pair, `w[*in, D]`, dim `shard_dim` of `in` sharded: h -> x.

        beside: two more factors, `[B, T, R]` and `[R, D]`, whose product is part of the sum.
        """

    @abc.abstractmethod
    def square(self, x: Array, w: Array) -> Array:
        """A single matmul, `w[D, D']`: x -> x as the residual stream has it."""

    @abc.abstractmethod
    def logits(self, x: Array, w: Array) -> Array:
        """The output layer: a first matmul, but never in less than the precision of `x`."""

    @abc.abstractmethod
    def visit_experts(
        self, sums: ExpertSums, x: Array, weight: Array, expert: Array, w: Any
    ) -> Array:
        """Lets each token pass the experts of all devices, and adds up what they return.

        Args:
            sums: for tokens, the sums over this device's experts.
            x: `[B, T, D]`, as the residual stream has it.
            weight: `[B, T, K]`, of each token's experts.
            expert: `[B, T, K]`, their numbers.
            w: matrices of this device's experts.
        """

    # ---- tables ----

    @abc.abstractmethod
    def lookup(self, tokens_BT: Array, table: Array, dtype: DTypeLike) -> Array:
        """Rows of the embedding table `[V, D]`, in `dtype`: -> x."""

    @abc.abstractmethod
    def positions(self, position_T: Array, table: Array, dtype: DTypeLike) -> Array:
        """Rows of the position table `[T, D]` for a cp block's tokens: -> x, without B if alike."""

    # ---- attention ----

    @abc.abstractmethod
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        inputs: AttentionInputs,
        *,
        kernel: Kernel,
        scores: Scores,
    ) -> Array:
        """Attention: q `[B, T, N, H]`, k, v `[B, S, K, H]`, sharded as h -> o, sharded as h.

        A bias in `inputs` is for this device's heads.
        """

    def join_heads(self, h: Array, head_size: int) -> Array:
        """h[B, T, N, H] -> the same with whole heads, for attention with a cache."""
        return self.axes.gather(h, -1)[..., :head_size] if self.axes.head_dim else h

    def split_heads(self, h: Array, unit: int = 1) -> Array:
        """h[B, T, N, H] with whole heads -> h. Undoes `join_heads`."""
        if not self.axes.head_dim:
            return h
        padding = self.padded_head(h.shape[-1], unit) - h.shape[-1]
        return self.axes.scatter(jnp.pad(h, [(0, 0)] * (h.ndim - 1) + [(0, padding)]), -1)


def separated(x: Array, dim: int) -> list[Array]:
    """Splits a dim of size n into n arrays.

    The transpose of a split is one concatenation. Moving the dim in front instead would make XLA
    stack the gradients in a loop and then transpose them.
    """
    return [jnp.squeeze(each, dim) for each in lax.split(x, [1] * x.shape[dim], dim)]


def add_bias(x: Array, b: Array) -> Array:
    """x + b in the precision of x, with b's gradient, a sum over all tokens, in that of b.

    In bfloat16 a sum of thousands stops growing, because 2**8 + 1 rounds to 2**8.
    """
    return _add_bias(*alike(x, b))


@jax.custom_vjp
def _add_bias(x: Array, b: Array) -> Array:
    # The barrier makes another kernel cast b: XLA's matmuls add a bias as they write, but only one
    # of one dim, and without a cast.
    flat = lax.optimization_barrier(b.astype(x.dtype).reshape(-1))
    return (x.reshape(*x.shape[: x.ndim - b.ndim], -1) + flat).reshape(x.shape)


def _add_bias_fwd(x: Array, b: Array) -> tuple[Array, Array]:
    return _add_bias(x, b), jnp.zeros((0,) * b.ndim, b.dtype)  # b's rank and dtype, no elements


def _add_bias_bwd(kind: Array, dy: Array) -> tuple[Array, Array]:
    return dy, dy.astype(kind.dtype).sum(tuple(range(dy.ndim - kind.ndim)))


_add_bias.defvjp(_add_bias_fwd, _add_bias_bwd)


@jax.custom_vjp
def both_gradients(x: Array, w: Array) -> tuple[Array, Array]:
    """Returns (x, w); backward continues once both gradients, of x and of w, are computed.

    XLA would schedule w's gradient late and keep the logits' gradient alive until then. Both are
    read from the barrier, or XLA would drop the unread one.
    """
    return x, w


def _both_gradients_fwd(x: Array, w: Array) -> tuple[tuple[Array, Array], None]:
    return (x, w), None


def _both_gradients_bwd(_: None, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
    return after(gradients, ())


both_gradients.defvjp(_both_gradients_fwd, _both_gradients_bwd)


def joined_products(
    multiply: Callable[[Array, Array], Array], x: Array, weights: Sequence[PackedWeight]
) -> list[Array]:
    """The h of every matrix from one `multiply(x, w[D, *out])`, so that x moves once."""
    lead = x.ndim - 1
    if len(weights) == 1:
        (packed,) = weights
        (h,) = packed._replace(parts=False).with_biases([multiply(x, packed.w)])
        return separated(h, lead) if packed.parts else [h]

    # Concatenates weights again in backward, because a scan would save second copies of them.
    policy = jax.checkpoint_policies.save_only_these_names(SAVED_MATMUL_IN)

    @partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def joined(x: Array, weights: Sequence[Array]) -> Array:
        return multiply(x, jnp.concatenate([w.reshape(w.shape[0], -1) for w in weights], 1))

    h = joined(x, [each.w for each in weights])
    pieces = lax.split(h, [math.prod(each.w.shape[1:]) for each in weights], lead)
    outputs = []
    for piece, each in zip(pieces, weights, strict=True):
        shaped = piece.reshape(*h.shape[:lead], *each.w.shape[1:])
        outputs += each.with_biases(separated(shaped, lead) if each.parts else [shaped])
    return outputs


def matmul(x: Array, w: Array, contract: int) -> Array:
    """Contracts the last `contract` dims of `x` with the first of `w`, in the precision of `x`.

    Backward casts `w` again, so that a scan over layers saves no second copy of all weights.
    """
    return _product(*alike(x, w), contract)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, w: Array, contract: int) -> Array:
    lead = x.shape[: x.ndim - contract]
    rows = x.reshape(*lead, -1)
    y = jnp.matmul(rows, w.reshape(rows.shape[-1], -1).astype(x.dtype))
    return y.reshape(*lead, *w.shape[contract:])


def _product_fwd(x: Array, w: Array, contract: int) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, w, contract), (x, w)


def _product_bwd(contract: int, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    w_DF = w.reshape(math.prod(w.shape[:contract]), -1)
    # As matrices, because XLA transposes a dy of more dims in memory.
    dy = dy.reshape(*dy.shape[: x.ndim - contract], -1)
    dw = jnp.matmul(x.reshape(-1, w_DF.shape[0]).T, dy.reshape(-1, w_DF.shape[1]))
    # If w is wider, XLA could skip this rounding, and layouts would round differently.
    precision = jnp.finfo(x.dtype)
    dw = lax.reduce_precision(dw.astype(w.dtype), precision.nexp, precision.nmant)
    dx = jnp.matmul(dy, w_DF.astype(x.dtype).T)
    return dx.reshape(x.shape), dw.reshape(w.shape)


_product.defvjp(_product_fwd, _product_bwd)

NATIVE = MatmulPrecision(matmul, block_matmul)
