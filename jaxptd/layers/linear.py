"""The linear layers of tensor parallelism. Letters: B batch, T position, D model, F hidden."""

from collections.abc import Sequence
from typing import Self

from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxptd.layers.tensor_parallel import PackedWeight, TensorParallel, add_bias
from jaxptd.params import Initialiser, normal, param, zeros
from jaxptd.parts.parameters import Column, Named, Row, square
from jaxptd.remat import SAVED_MATMUL_IN

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

    w: nnx.Param
    b: nnx.Param | None = None

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
        shape = Column(
            in_features, tuple(out_features), dim=shard_dim, bias=bias, padded=padded, parts=parts
        )
        declare(self, shape.parameters(tensor_parallel), rngs, w=init)
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
        )

    @property
    def bias(self) -> Array | None:
        return None if self.b is None else self.b[...]

    def kept(self, x_BTD: Array, *, bare: bool = False) -> Array:
        """x -> h, not gathered; backward keeps it, and not the product without the bias.

        bare: without its bias.
        """
        w = PackedWeight(self.w[...], None if bare else self.bias)
        (h,) = self.tensor_parallel.column_parallel(x_BTD, [w])
        return h

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

    w: nnx.Param
    b: nnx.Param | None = None

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
        shape = Row(tuple(in_features), out_features, dim=shard_dim, bias=bias, padded=padded)
        declare(self, shape.parameters(tensor_parallel), rngs, w=init)
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
    return linears[0].tensor_parallel.column_parallel(x_BTD, weights)


def declare(layer: nnx.Module, parameters: Named, rngs: nnx.Rngs, **inits: Initialiser) -> None:
    """Declares the parameters of a layer by their names.

    Args:
        layer: that gets them as attributes.
        parameters: their descriptions, in the order in which random keys are drawn.
        rngs: random keys of the initial values.
        inits: initialisers by name; biases `b` begin as zeros.
    """
    for name, shape in parameters:
        setattr(layer, name, param(rngs(), shape, inits.get(name, zeros)))
