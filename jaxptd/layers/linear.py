"""The layers that are one matrix: linear layers, and tables of tokens and positions.

Letters: B batch, T position, D model, F hidden, V vocabulary.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxptd.collectives import alike
from jaxptd.layers.adapters import LowRank
from jaxptd.layers.tensor_parallel import (
    PackedWeight,
    TensorParallel,
    add_bias,
    block_along,
    both_gradients,
)
from jaxptd.params import Initialiser, normal, param, zeros
from jaxptd.parts.adapters import Adapter
from jaxptd.parts.parameters import (
    Column,
    Row,
    positions,
    square,
    token_types,
    vocabulary,
    vocabulary_bias,
)
from jaxptd.remat import SAVED_MATMUL_IN
from jaxptd.shapes import ParamShape

INIT = normal(0.02)  # GPT-2's


class ColumnParallelLinear(nnx.Module):
    """`x[B, T, D] -> h[B, T, *out]`; the weight `[D, *out]` is sharded over one dim of `out`, and
    on a grid also over D.

    Args:
        in_features: D.
        out_features: the shape `out`; `(3, N, H)` for attention, `(F,)` for the MLP.
        shard_dim: the dim of `out` that is sharded.
        tensor_parallel: how matrices are sharded.
        rngs: random keys of the initial weight.
        padded: size of that dim including padding; None rounds up to what the layout needs.
        bias: whether a bias `[*out]` is added.
        gather_output: whether every device gets all of h.
        init: initialiser of the weight.
        parts: leading dims of `out` that number separate matrices: 1 for `(3, N, H)`, else 0.
        adapter: of low rank beside the weight, or None.

    Source: Shoeybi et al., arXiv 1909.08053, section 3.
    """

    w: nnx.Param
    b: nnx.Param | None = None
    lora: LowRank | None = None

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        shard_dim: int = 0,
        padded: int | None = None,
        bias: bool = True,
        gather_output: bool = False,
        init: Initialiser = INIT,
        parts: int = 0,
        adapter: Adapter | None = None,
    ) -> None:
        shape = Column(
            in_features,
            tuple(out_features),
            dim=shard_dim,
            bias=bias,
            padded=padded,
            parts=parts,
            adapter=adapter,
        )
        declare_linear(self, shape, tensor_parallel=tensor_parallel, rngs=rngs, init=init)
        self.tensor_parallel, self.shard_dim, self.gather_output = (
            tensor_parallel,
            shard_dim,
            gather_output,
        )
        self.parts = parts

    @classmethod
    def of(cls, shape: Column, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs) -> Self:
        """The layer of a description."""
        return cls(
            shape.size,
            shape.out,
            tensor_parallel=tensor_parallel,
            rngs=rngs,
            shard_dim=shape.dim,
            padded=shape.padded,
            bias=shape.bias,
            parts=shape.parts,
            adapter=shape.adapter,
        )

    @property
    def bias(self) -> Array | None:
        return None if self.b is None else self.b[...]

    def kept(self, x_BTD: Array, *, bare: bool = False) -> Array:
        """x -> h, not gathered; h is saved for backward, not the product without the bias.

        bare: leaves out the bias.
        """
        w = PackedWeight(self.w[...], None if bare else self.bias)
        adapters = [self.lora.first] if self.lora else []
        h, *low = self.tensor_parallel.column_parallel(x_BTD, [w, *adapters])
        return self.lora.of_all(h, low) if self.lora else h

    def __call__(self, x_BTD: Array) -> Array:
        h = self.kept(x_BTD, bare=True)
        h = h if self.bias is None else checkpoint_name(add_bias(h, self.bias), SAVED_MATMUL_IN)
        return (
            self.tensor_parallel.axes.gather(h, x_BTD.ndim - 1 + self.shard_dim)
            if self.gather_output
            else h
        )


class RowParallelLinear(nnx.Module):
    """`h[B, T, *in] -> y[B, T, D]`; the weight `[*in, D]` is sharded over one dim of `in`, and on a
    grid also over D.

    Args:
        in_features: the shape `in`; `(N, H)` for attention, `(F,)` for the MLP.
        out_features: D.
        shard_dim: the dim of `in` that is sharded.
        tensor_parallel: how matrices are sharded.
        rngs: random keys of the initial weight.
        padded: size of that dim including padding; None rounds up to what the layout needs.
        bias: whether a bias `[D]` is added, once, after the sum over devices.
        input_is_parallel: whether h is sharded already; else each device takes its block of it.
        init: initialiser of the weight.
        adapter: of low rank beside the weight, or None.

    Source: Shoeybi et al., arXiv 1909.08053, section 3.
    """

    w: nnx.Param
    b: nnx.Param | None = None
    lora: LowRank | None = None

    def __init__(
        self,
        in_features: Sequence[int],
        out_features: int,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        shard_dim: int = 0,
        padded: int | None = None,
        bias: bool = True,
        input_is_parallel: bool = True,
        init: Initialiser = INIT,
        adapter: Adapter | None = None,
    ) -> None:
        shape = Row(
            tuple(in_features),
            out_features,
            dim=shard_dim,
            bias=bias,
            padded=padded,
            adapter=adapter,
        )
        declare_linear(self, shape, tensor_parallel=tensor_parallel, rngs=rngs, init=init)
        self.tensor_parallel, self.shard_dim, self.input_is_parallel = (
            tensor_parallel,
            shard_dim,
            input_is_parallel,
        )

    @classmethod
    def of(
        cls, shape: Row, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs, init: Initialiser
    ) -> Self:
        """The layer of a description; init: initialiser of its weight."""
        return cls(
            shape.inside,
            shape.size,
            tensor_parallel=tensor_parallel,
            rngs=rngs,
            shard_dim=shape.dim,
            padded=shape.padded,
            bias=shape.bias,
            init=init,
            adapter=shape.adapter,
        )

    def __call__(self, h: Array) -> Array:
        if not self.input_is_parallel:
            h = self.tensor_parallel.axes.scatter(h, h.ndim - (self.w.ndim - 1) + self.shard_dim)
        beside = self.lora.beside(h) if self.lora else None
        y_BTD = self.tensor_parallel.row_parallel(h, self.w[...], self.shard_dim, beside)
        return y_BTD if self.b is None else add_bias(y_BTD, self.b[...])


class SquareLinear(nnx.Module):
    """`x[B, T, D] -> y[B, T, D']`, both as the residual stream has them: a single matmul.

    In 1D every device has the whole weight `[D, D']`, and no collective is needed. A grid has it in
    blocks.

    Args:
        in_features: D.
        out_features: D'.
        tensor_parallel: how matrices are sharded.
        rngs: random keys of the initial weight.
    """

    w: nnx.Param
    b: nnx.Param

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
    ) -> None:
        declare(self, square(tensor_parallel, in_features, out_features), rngs, w=INIT)
        self.tensor_parallel = tensor_parallel

    def __call__(self, x_BTD: Array) -> Array:
        return add_bias(self.tensor_parallel.square(x_BTD, self.w[...]), self.b[...])


def multiply(x_BTD: Array, *linears: ColumnParallelLinear) -> list[Array]:
    """The h of each matrix of several layers that read the same x, which is gathered once."""
    weights = [PackedWeight(x.w[...], x.bias, parts=bool(x.parts)) for x in linears]
    adapters = [x.lora.first for x in linears if x.lora]
    found = iter(linears[0].tensor_parallel.column_parallel(x_BTD, [*weights, *adapters]))
    numbers = [x.w.shape[1] if x.parts else 1 for x in linears]
    products = [list(itertools.islice(found, number)) for number in numbers]
    several: list[Array] = []
    for x, own in zip(linears, products, strict=True):
        several += x.lora.of_each(own, list(itertools.islice(found, len(own)))) if x.lora else own
    return several


def declare(
    layer: nnx.Module,
    parameters: Iterable[tuple[str, ParamShape]],
    rngs: nnx.Rngs,
    **inits: Initialiser,
) -> Array:
    """Declares the parameters of a layer by their names.

    Args:
        layer: gets them as attributes.
        parameters: their descriptions, in the order in which random keys are drawn.
        rngs: random keys of the initial values.
        inits: initialisers by name; biases `b` begin as zeros.

    Returns:
        the last of these keys.
    """
    key: Any = None
    for name, shape in parameters:
        key = rngs()
        setattr(layer, name, param(key, shape, inits.get(name, zeros)))
    return key


def declare_linear(
    layer: "ColumnParallelLinear | RowParallelLinear",
    shape: Column | Row,
    *,
    tensor_parallel: TensorParallel,
    rngs: nnx.Rngs,
    init: Initialiser,
) -> None:
    """Declares a weight, its bias and its adapter, which draws no key: others stay as without it.

    init: initialiser of the weight.
    """
    named = dict(shape.parameters(tensor_parallel))
    of_adapter = {each: named.pop(f"lora.{each}") for each in "ab" if shape.adapter}
    key = declare(layer, named.items(), rngs, w=init)
    if shape.adapter:
        key = jax.random.fold_in(key, 1)
        layer.lora = LowRank(shape.adapter, of_adapter, rows=shape.rows, key=key)


# ---- tables of tokens and positions --------------------------------------------------------------


class VocabParallelEmbedding(nnx.Module):
    """A table `[V, D]` sharded over the vocabulary, on a grid over D too; also the output layer.

    A vocabulary that does not split evenly is padded with zero rows. They are never looked up and
    the loss gives them no probability, so they get no gradient and stay zero.

    Args:
        vocab_size: V.
        size: D.
        tensor_parallel: how matrices are sharded.
        rngs: random keys of the initial table.
        rows: V including padding; None pads to what `tensor_parallel` needs.
        init: initialiser of the table.

    Source: Shoeybi et al., arXiv 1909.08053, section 3.
    """

    table: nnx.Param

    def __init__(
        self,
        vocab_size: int,
        size: int,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        rows: int | None = None,
        init: Initialiser = INIT,
    ) -> None:
        self.rows = rows or tensor_parallel.padded(vocab_size)
        shape = vocabulary(tensor_parallel, vocab_size, size, self.rows)
        declare(self, shape, rngs, table=init)
        self.vocab_size, self.tensor_parallel = vocab_size, tensor_parallel

    def __call__(self, tokens_BT: Array, dtype: DTypeLike) -> Array:
        """tokens[B, T] with ids in [0, V) -> x as the residual stream has it, in `dtype`."""
        return self.tensor_parallel.lookup(tokens_BT, self.table[...], dtype)

    def logits(self, x_BTD: Array) -> Array:
        """x -> logits[B, T, V], sharded over V, including those of the padding."""
        return self.tensor_parallel.logits(x_BTD, self.table[...].T)


class PositionEmbedding(nnx.Module):
    """A learned vector for each position, table `[S, D]`: replicated, or in blocks on a grid.

    Positions from S on belong to padding, and their vectors may be any finite ones.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2).
    """

    table: nnx.Param

    def __init__(
        self, rows: int, size: int, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs
    ) -> None:
        declare(self, positions(tensor_parallel, rows, size), rngs, table=INIT)
        self.tensor_parallel = tensor_parallel

    def __call__(self, position_T: Array, dtype: DTypeLike) -> Array:
        """positions[.., T] of a cp block -> [.., T, D] for the tokens of the residual stream."""
        return self.tensor_parallel.positions(position_T, self.table[...], dtype)


class TypeEmbedding(nnx.Module):
    """A learned vector for each type of token, `w[K, D]` of K types; in 1D every device has all.

    There are few types, so a matmul of one-hot rows costs less than a look-up, and no collective.

    Source: Devlin et al., arXiv 1810.04805, section 3.2.
    """

    w: nnx.Param

    def __init__(
        self, types: int, size: int, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs
    ) -> None:
        declare(self, token_types(tensor_parallel, types, size), rngs, w=INIT)
        self.tensor_parallel = tensor_parallel

    def __call__(self, type_BT: Array, dtype: DTypeLike) -> Array:
        """types[B, T] of a cp block -> x as the residual stream has it."""
        local_BT = block_along(type_BT, self.tensor_parallel.axes.tokens, 1)
        one_hot_BTK = jax.nn.one_hot(local_BT, self.w.shape[0], dtype=dtype)
        one_hot_BTK, w_KD = alike(one_hot_BTK, self.w[...])
        return jnp.einsum("BTK,KD->BTD", one_hot_BTK, w_KD.astype(dtype))


class VocabularyBias(nnx.Module):
    """`b[V]`, added to logits, and sharded and padded as they are.

    Args:
        vocab_size: V.
        tensor_parallel: how matrices are sharded.
        rows: V with its padding.
    """

    b: nnx.Param

    def __init__(self, vocab_size: int, *, tensor_parallel: TensorParallel, rows: int) -> None:
        shape = vocabulary_bias(tensor_parallel, vocab_size, rows)
        declare(self, shape, nnx.Rngs(0))  # zeros need no key

    def __call__(self, logits_BTV: Array) -> Array:
        """Logits[B, T, V] -> the same with the bias."""
        return add_bias(*both_gradients(logits_BTV, self.b[...]))
