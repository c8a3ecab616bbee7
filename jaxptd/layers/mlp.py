"""The MLP of a block. Letters: B batch, T position, D model, F hidden."""

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.kernel import TAKEN
from jaxptd.layers.form import TensorParallel
from jaxptd.layers.linear import ColumnParallelLinear, RowParallelLinear, add_bias
from jaxptd.params import Initialiser


@jax.checkpoint
def _activate(h_BTF: Array, b_F: Array | None) -> Array:
    """Bias and GELU; backward recomputes both from the product, which is saved anyway."""
    h_BTF = h_BTF if b_F is None else add_bias(h_BTF, b_F)
    return jax.nn.gelu(h_BTF, approximate=True)


class MLP(nnx.Module):
    """`gelu(x w_up + b_up) w_down + b_down`; GELU is elementwise and needs no collective."""

    def __init__(
        self, size: int, hidden: int, *, form: TensorParallel, rngs: nnx.Rngs, init_out: Initialiser
    ) -> None:
        self.up = ColumnParallelLinear(size, (hidden,), form=form, rngs=rngs)
        self.down = RowParallelLinear((hidden,), size, form=form, rngs=rngs, init=init_out)

    @jax.named_scope("mlp")
    def __call__(self, x_BTD: Array) -> Array:
        """x as the residual stream has it -> the same."""
        h_BTF = _activate(self.up.product(x_BTD), self.up.bias)
        return self.down(checkpoint_name(h_BTF, TAKEN))
