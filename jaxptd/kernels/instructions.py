"""Instructions of NVIDIA GPUs that Pallas has no operation for; elsewhere, their formula.

XLA's powers and roots also treat numbers below 1e-38 exactly, which takes three instructions more;
these take them as zero. And XLA rounds a product before it adds to it, in two instructions.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton

LOG2_E = math.log2(math.e)  # exp(x) is 2 to the power of x times this


@dataclasses.dataclass(frozen=True)
class Instructions:
    """One instruction each, of numbers in float32.

    Args:
        interpret: computes the formula, on any device.
    """

    interpret: bool

    def exp2(self, x: Array) -> Array:
        """2 to the power of x, to 2 units in the last place."""
        return jnp.exp2(x) if self.interpret else _run("ex2.approx.ftz.f32", x)

    def reciprocal(self, x: Array) -> Array:
        """1 / x, to 1 unit in the last place."""
        return 1 / x if self.interpret else _run("rcp.approx.ftz.f32", x)

    def fma(self, x: Array, y: Array | float, z: Array | float) -> Array:
        """`x y + z`, rounded once."""
        return x * y + z if self.interpret else _run("fma.rn.f32", x, y, z)


def _run(name: str, *inputs: Array | float) -> Array:
    """Runs an instruction for each number of its inputs."""
    shape = jnp.broadcast_shapes(*(jnp.shape(each) for each in inputs))
    (found,) = triton.elementwise_inline_asm(
        f"{name} $0, {', '.join(f'${1 + number}' for number in range(len(inputs)))};",
        args=[jnp.broadcast_to(jnp.asarray(each, jnp.float32), shape) for each in inputs],
        constraints="=f" + ",f" * len(inputs),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return found
