"""The two linear layers of tensor parallelism. Letters: B batch, T position, D model, F hidden."""

import math
from collections.abc import Sequence
from functools import partial

from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.kernel import KEPT, TAKEN
from jaxptd.layers.form import TensorParallel
from jaxptd.params import Initialiser, normal, param, zeros

INIT = normal(0.02)  # GPT-2's


class ColumnParallelLinear(nnx.Module):
    """`x[B, T, D] -> h[B, T, *out]`, the weight `[D, *out]` cut along dim `cut` of `out`, and on
    a grid along D.

    Args:
        in_features: D.
        out_features: the shape `out`; `(3, N, H)` for attention, `(F,)` for the MLP.
        cut: the dim of `out` that is cut.
        form: how matrices are held.
        rngs: of the initial weight.
        bias: whether a bias `[*out]` is added.
        gather_output: leave h whole on every device.
        init: of the weight.

    Source: Shoeybi et al., arXiv 1909.08053, section 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        *,
        form: TensorParallel,
        rngs: nnx.Rngs,
        cut: int = 0,
        bias: bool = True,
        gather_output: bool = False,
        init: Initialiser = INIT,
    ) -> None:
        out, dims = tuple(out_features), len(out_features)
        held = _held(out, cut, form)
        self.w = param(
            rngs(),
            (in_features, *out),
            init,
            spec=form.column_spec(dims, cut),
            held=(form.padded_hidden(in_features), *held),
            cast=True,
        )
        bias_of = partial(param, spec=form.cut_spec(dims, cut), held=held, decay=False)
        self.b = bias_of(rngs(), out, zeros) if bias else None
        self.form, self.cut, self.gather_output = form, cut, gather_output

    @property
    def bias(self) -> Array | None:
        return None if self.b is None else self.b[...]

    def product(self, x_BTD: Array) -> Array:
        """h, but for the bias and the gathering."""
        return checkpoint_name(self.form.column(x_BTD, self.w[...]), KEPT)

    def __call__(self, x_BTD: Array) -> Array:
        h = self.product(x_BTD)
        if self.bias is not None:
            h = checkpoint_name(add_bias(h, self.bias), TAKEN)
        return self.form.gather(h, x_BTD.ndim - 1 + self.cut) if self.gather_output else h


class RowParallelLinear(nnx.Module):
    """`h[B, T, *in] -> y[B, T, D]`, the weight `[*in, D]` cut along dim `cut` of `in`, and on a
    grid along D.

    Args:
        in_features: the shape `in`; `(N, H)` for attention, `(F,)` for the MLP.
        out_features: D.
        cut: the dim of `in` that is cut.
        form: how matrices are held.
        rngs: of the initial weight.
        bias: whether a bias `[D]` is added, once, after the sum.
        input_is_parallel: h is cut already; else this device takes its own block.
        init: of the weight.

    Source: Shoeybi et al., arXiv 1909.08053, section 3.
    """

    def __init__(
        self,
        in_features: Sequence[int],
        out_features: int,
        *,
        form: TensorParallel,
        rngs: nnx.Rngs,
        cut: int = 0,
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
            spec=form.row_spec(dims, cut),
            held=(*_held(inside, cut, form), hidden),
            cast=True,
        )
        bias_of = partial(param, spec=form.hidden_spec(), held=(hidden,), decay=False)
        self.b = bias_of(rngs(), (out_features,), zeros) if bias else None
        self.form, self.cut, self.input_is_parallel = form, cut, input_is_parallel

    def __call__(self, h: Array) -> Array:
        if not self.input_is_parallel:
            h = self.form.scatter(h, h.ndim - (self.w.ndim - 1) + self.cut)
        y_BTD = checkpoint_name(self.form.row(h, self.w[...], self.cut), KEPT)
        return y_BTD if self.b is None else add_bias(y_BTD, self.b[...])


def add_bias(x: Array, b: Array) -> Array:
    """x + b, in the precision of x; the bias's gradient, a sum over all tokens, in its own.

    A sum of thousands in bfloat16 stops growing: 2**8 + 1 is 2**8 there.
    """
    return (x + b).astype(x.dtype)


def _held(shape: tuple[int, ...], cut: int, form: TensorParallel) -> tuple[int, ...]:
    """The shape with its dim `cut` in equal blocks."""
    cut_size = form.padded(shape[cut], each=math.prod(shape[cut + 1 :]))
    return (*shape[:cut], cut_size, *shape[cut + 1 :])
