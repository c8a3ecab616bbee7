"""The linear layers of tensor parallelism. Letters: B batch, T position, D model, F hidden."""

import math
from collections.abc import Sequence
from functools import partial

from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.kernel import TAKEN
from jaxptd.layers.tensor_parallel import Matrices, TensorParallel, add_bias
from jaxptd.params import Initialiser, normal, param, zeros

INIT = normal(0.02)  # GPT-2's


class ColumnParallelLinear(nnx.Module):
    """`x[B, T, D] -> h[B, T, *out]`; the weight `[D, *out]` is sharded over one dim of `out`, and
    on a grid over D, too.

    Args:
        in_features: D.
        out_features: the shape `out`; `(3, N, H)` for attention, `(F,)` for the MLP.
        shard_dim: the dim of `out` that is sharded.
        tensor_parallel: how matrices are sharded.
        rngs: random keys of the initial weight.
        padded: that dim with its padding; None: as the layout rounds it up.
        bias: whether a bias `[*out]` is added.
        gather_output: whether every device gets all of h.
        init: initialiser of the weight.
        parts: leading dims of `out` that number matrices of their own: 1 for `(3, N, H)`, else 0.

    Source: Shoeybi et al., arXiv 1909.08053, section 3.
    """

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
    ) -> None:
        out, dims = tuple(out_features), len(out_features)
        stored = _padded(out, shard_dim, padded, tensor_parallel)
        self.w = param(
            rngs(),
            (in_features, *out),
            init,
            spec=tensor_parallel.axes.column_spec(dims, shard_dim),
            padded=(tensor_parallel.padded_hidden(in_features), *stored),
            cast=True,
            matrix="r" + "s" * parts + "c" * (dims - parts),
        )
        bias_of = partial(
            param, spec=tensor_parallel.axes.inner_spec(dims, shard_dim), padded=stored, decay=False
        )
        self.b = bias_of(rngs(), out, zeros) if bias else None
        self.tensor_parallel, self.shard_dim, self.gather_output = (
            tensor_parallel,
            shard_dim,
            gather_output,
        )
        self.parts = parts

    @property
    def bias(self) -> Array | None:
        return None if self.b is None else self.b[...]

    @property
    def matrices(self) -> Matrices:
        return Matrices(self.w[...], self.bias, parts=bool(self.parts))

    def kept(self, x_BTD: Array) -> Array:
        """x -> h, not gathered; backward keeps it, and not the product without the bias."""
        return self._product(x_BTD, self.bias)

    def bare(self, x_BTD: Array) -> Array:
        """x -> h without its bias, not gathered; backward keeps it."""
        return self._product(x_BTD)

    def __call__(self, x_BTD: Array) -> Array:
        h = self._product(x_BTD)
        h = h if self.bias is None else checkpoint_name(add_bias(h, self.bias), TAKEN)
        return (
            self.tensor_parallel.axes.gather(h, x_BTD.ndim - 1 + self.shard_dim)
            if self.gather_output
            else h
        )

    def _product(self, x_BTD: Array, bias: Array | None = None) -> Array:
        (h,) = self.tensor_parallel.column_parallel(x_BTD, [Matrices(self.w[...], bias)])
        return h


class RowParallelLinear(nnx.Module):
    """`h[B, T, *in] -> y[B, T, D]`; the weight `[*in, D]` is sharded over one dim of `in`, and on a
    grid over D, too.

    Args:
        in_features: the shape `in`; `(N, H)` for attention, `(F,)` for the MLP.
        out_features: D.
        shard_dim: the dim of `in` that is sharded.
        tensor_parallel: how matrices are sharded.
        rngs: random keys of the initial weight.
        padded: that dim with its padding; None: as the layout rounds it up.
        bias: whether a bias `[D]` is added, once, after the sum over devices.
        input_is_parallel: whether h is sharded already; else each device takes its block of it.
        init: initialiser of the weight.

    Source: Shoeybi et al., arXiv 1909.08053, section 3.
    """

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
    ) -> None:
        inside, dims = tuple(in_features), len(in_features)
        hidden = tensor_parallel.padded_hidden(out_features)
        self.w = param(
            rngs(),
            (*inside, out_features),
            init,
            spec=tensor_parallel.axes.row_spec(dims, shard_dim),
            padded=(*_padded(inside, shard_dim, padded, tensor_parallel), hidden),
            cast=True,
            matrix="r" * dims + "c",
        )
        bias_of = partial(
            param, spec=tensor_parallel.axes.hidden_spec(), padded=(hidden,), decay=False
        )
        self.b = bias_of(rngs(), (out_features,), zeros) if bias else None
        self.tensor_parallel, self.shard_dim, self.input_is_parallel = (
            tensor_parallel,
            shard_dim,
            input_is_parallel,
        )

    def __call__(self, h: Array) -> Array:
        if not self.input_is_parallel:
            h = self.tensor_parallel.axes.scatter(h, h.ndim - (self.w.ndim - 1) + self.shard_dim)
        y_BTD = self.tensor_parallel.row_parallel(h, self.w[...], self.shard_dim)
        return y_BTD if self.b is None else add_bias(y_BTD, self.b[...])


class SquareLinear(nnx.Module):
    """`x[B, T, D] -> y[B, T, D']`, both as the residual stream has them: a product by itself.

    In 1D it needs no collective.

    The weight `[D, D']` is whole on every device in 1D, on a grid in blocks.

    Args:
        in_features: D.
        out_features: D'.
        tensor_parallel: how matrices are sharded.
        rngs: random keys of the initial weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = (
            tensor_parallel.padded_hidden(in_features),
            tensor_parallel.padded_hidden(out_features),
        )
        self.w = param(
            rngs(),
            (in_features, out_features),
            INIT,
            spec=tensor_parallel.axes.square_spec(),
            padded=sizes,
            cast=True,
            matrix="rc",
        )
        self.b = param(
            rngs(),
            (out_features,),
            zeros,
            spec=tensor_parallel.axes.hidden_spec(),
            padded=sizes[1:],
            decay=False,
        )
        self.tensor_parallel = tensor_parallel

    def __call__(self, x_BTD: Array) -> Array:
        return add_bias(self.tensor_parallel.square(x_BTD, self.w[...]), self.b[...])


def multiply(x_BTD: Array, *linears: ColumnParallelLinear) -> list[Array]:
    """The h of each matrix of several layers that read the same x, which is gathered once."""
    return linears[0].tensor_parallel.column_parallel(x_BTD, [each.matrices for each in linears])


def _padded(
    shape: tuple[int, ...], shard_dim: int, padded: int | None, tensor_parallel: TensorParallel
) -> tuple[int, ...]:
    """The shape with dim `shard_dim` padded; None: as the layout rounds it up."""
    before, size, after = shape[:shard_dim], shape[shard_dim], shape[shard_dim + 1 :]
    return (*before, padded or tensor_parallel.padded(size, each=math.prod(after)), *after)
