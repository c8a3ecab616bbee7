"""The MLP of a block. Letters: B batch, T position, D model, F hidden."""

from functools import partial

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxptd.flash import TAKEN
from jaxptd.layers.form import TensorParallel
from jaxptd.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxptd.params import Initialiser

# Backward computes GELU's inner values again from its input, which is kept anyway.
_gelu = jax.checkpoint(partial(jax.nn.gelu, approximate=True))


class MLP(nnx.Module):
    """`gelu(x w_up + b_up) w_down + b_down`; GELU acts on disjoint units, nothing moves there."""

    def __init__(
        self, size: int, hidden: int, *, form: TensorParallel, rngs: nnx.Rngs, init_out: Initialiser
    ) -> None:
        self.up = ColumnParallelLinear(size, (hidden,), form=form, rngs=rngs)
        self.down = RowParallelLinear((hidden,), size, form=form, rngs=rngs, init=init_out)

    def __call__(self, x_BTD: Array) -> Array:
        """x, as the residual stream has it, -> the same."""
        h_BTF = checkpoint_name(_gelu(self.up(x_BTD)), TAKEN)
        return self.down(h_BTF)
