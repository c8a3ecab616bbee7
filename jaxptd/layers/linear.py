"""The linear layers of tensor parallelism. Letters: B batch, T position, D model, F hidden."""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.kernel import KEPT, TAKEN
from jaxptd.collectives import alike
from jaxptd.layers.form import TensorParallel
from jaxptd.params import Initialiser, normal, param, zeros

INIT = normal(0.02)  # GPT-2's


class ColumnParallelLinear(nnx.Module):
    """`x[B, T, D] -> h[B, T, *out]`; the weight `[D, *out]` is sharded over one dim of `out`, and
    on a grid over D, too.

    Args:
        in_features: D.
        out_features: the shape `out`; `(3, N, H)` for attention, `(F,)` for the MLP.
        shard_dim: the dim of `out` that is sharded.
        form: how matrices are sharded.
        rngs: random keys of the initial weight.
        padded: that dim with its padding; None: as the form rounds it up.
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
        form: TensorParallel,
        rngs: nnx.Rngs,
        shard_dim: int = 0,
        padded: int | None = None,
        bias: bool = True,
        gather_output: bool = False,
        init: Initialiser = INIT,
        parts: int = 0,
    ) -> None:
        out, dims = tuple(out_features), len(out_features)
        stored = _padded(out, shard_dim, padded, form)
        self.w = param(
            rngs(),
            (in_features, *out),
            init,
            spec=form.axes.column_spec(dims, shard_dim),
            padded=(form.padded_hidden(in_features), *stored),
            cast=True,
            matrix="r" + "s" * parts + "c" * (dims - parts),
        )
        bias_of = partial(
            param, spec=form.axes.inner_spec(dims, shard_dim), padded=stored, decay=False
        )
        self.b = bias_of(rngs(), out, zeros) if bias else None
        self.form, self.shard_dim, self.gather_output = form, shard_dim, gather_output

    @property
    def bias(self) -> Array | None:
        return None if self.b is None else self.b[...]

    def kept(self, x_BTD: Array) -> Array:
        """x -> h, not gathered; backward keeps it, and not the product without the bias."""
        h = self.form.column_parallel(x_BTD, self.w[...])
        return checkpoint_name(h if self.bias is None else add_bias(h, self.bias), KEPT)

    def __call__(self, x_BTD: Array) -> Array:
        h = checkpoint_name(self.form.column_parallel(x_BTD, self.w[...]), KEPT)
        h = self.add_bias(h)
        return (
            self.form.axes.gather(h, x_BTD.ndim - 1 + self.shard_dim) if self.gather_output else h
        )

    def add_bias(self, h: Array) -> Array:
        """h with the bias, if there is one."""
        return h if self.bias is None else checkpoint_name(add_bias(h, self.bias), TAKEN)


class RowParallelLinear(nnx.Module):
    """`h[B, T, *in] -> y[B, T, D]`; the weight `[*in, D]` is sharded over one dim of `in`, and on a
    grid over D, too.

    Args:
        in_features: the shape `in`; `(N, H)` for attention, `(F,)` for the MLP.
        out_features: D.
        shard_dim: the dim of `in` that is sharded.
        form: how matrices are sharded.
        rngs: random keys of the initial weight.
        padded: that dim with its padding; None: as the form rounds it up.
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
        form: TensorParallel,
        rngs: nnx.Rngs,
        shard_dim: int = 0,
        padded: int | None = None,
        bias: bool = True,
        input_is_parallel: bool = True,
        init: Initialiser = INIT,
    ) -> None:
        inside, dims = tuple(in_features), len(in_features)
        hidden = form.padded_hidden(out_features)
        self.w = param(
            rngs(),
            (*inside, out_features),
            init,
            spec=form.axes.row_spec(dims, shard_dim),
            padded=(*_padded(inside, shard_dim, padded, form), hidden),
            cast=True,
            matrix="r" * dims + "c",
        )
        bias_of = partial(param, spec=form.axes.hidden_spec(), padded=(hidden,), decay=False)
        self.b = bias_of(rngs(), (out_features,), zeros) if bias else None
        self.form, self.shard_dim, self.input_is_parallel = form, shard_dim, input_is_parallel

    def __call__(self, h: Array) -> Array:
        if not self.input_is_parallel:
            h = self.form.axes.scatter(h, h.ndim - (self.w.ndim - 1) + self.shard_dim)
        y_BTD = self.form.row_parallel(h, self.w[...], self.shard_dim)
        return y_BTD if self.b is None else add_bias(y_BTD, self.b[...])


class SquareLinear(nnx.Module):
    """`x[B, T, D] -> y[B, T, D']`, both as the residual stream has them: a product by itself.

    In a 1D form it needs no collective.

    The weight `[D, D']` is whole on every device of a 1D form, on a grid in blocks.

    Args:
        in_features: D.
        out_features: D'.
        form: how matrices are sharded.
        rngs: random keys of the initial weight.
    """

    def __init__(
        self, in_features: int, out_features: int, *, form: TensorParallel, rngs: nnx.Rngs
    ) -> None:
        sizes = (form.padded_hidden(in_features), form.padded_hidden(out_features))
        self.w = param(
            rngs(),
            (in_features, out_features),
            INIT,
            spec=form.axes.square_spec(),
            padded=sizes,
            cast=True,
            matrix="rc",
        )
        self.b = param(
            rngs(),
            (out_features,),
            zeros,
            spec=form.axes.hidden_spec(),
            padded=sizes[1:],
            decay=False,
        )
        self.form = form

    def __call__(self, x_BTD: Array) -> Array:
        return add_bias(self.form.square(x_BTD, self.w[...]), self.b[...])


def add_bias(x: Array, b: Array) -> Array:
    """x + b in the precision of x; the gradient of b, a sum over all tokens, in the precision of b.

    A sum of thousands in bfloat16 stops growing: 2**8 + 1 is 2**8 there.
    """
    return _add_bias(*alike(x, b))


@jax.custom_vjp
def _add_bias(x: Array, b: Array) -> Array:
    # Another kernel casts b: XLA's products add a bias as they write, but do not cast it.
    return x + lax.optimization_barrier(b.astype(x.dtype))


def _add_bias_fwd(x: Array, b: Array) -> tuple[Array, Array]:
    return _add_bias(x, b), b


def _add_bias_bwd(b: Array, dy: Array) -> tuple[Array, Array]:
    return dy, dy.astype(b.dtype).sum(tuple(range(dy.ndim - b.ndim)))


_add_bias.defvjp(_add_bias_fwd, _add_bias_bwd)


def multiply(x_BTD: Array, *linears: ColumnParallelLinear) -> list[Array]:
    """The h of several layers that read the same x, in one product, so that x is gathered once."""
    weights = [each.w[...] for each in linears]
    h = checkpoint_name(_product(x_BTD, weights, linears[0].form), KEPT)
    sizes = [math.prod(w.shape[1:]) for w in weights]
    pieces = zip(linears, weights, lax.split(h, sizes, h.ndim - 1), strict=True)
    return [each.add_bias(h.reshape(*h.shape[:-1], *w.shape[1:])) for each, w, h in pieces]


@partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_only_these_names(TAKEN),
    static_argnums=2,
    prevent_cse=False,
)
def _product(x_BTD: Array, weights: Sequence[Array], form: TensorParallel) -> Array:
    """Joins weights again in backward: a scan would keep second copies of them."""
    w = jnp.concatenate([w.reshape(w.shape[0], -1) for w in weights], 1)
    return form.column_parallel(x_BTD, w)


def _padded(
    shape: tuple[int, ...], shard_dim: int, padded: int | None, form: TensorParallel
) -> tuple[int, ...]:
    """The shape with dim `shard_dim` padded; None: as the form rounds it up."""
    before, size, after = shape[:shard_dim], shape[shard_dim], shape[shard_dim + 1 :]
    return (*before, padded or form.padded(size, each=math.prod(after)), *after)
