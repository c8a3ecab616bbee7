"""Activations: their formulas and derivatives, and training with each of them on a mesh."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from turns import by_turns

from jaxptd.analysis.jaxprs import traced
from jaxptd.layers.mlp import ACTIVATIONS
from jaxptd.mesh import Layout

X = np.linspace(-6, 6, 25)
STEP = 1e-6


def _gelu(x: float) -> float:
    return x * (1 + math.erf(x / 2**0.5)) / 2


FORMULAS = {
    "gelu": _gelu,
    "gelu-tanh": lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_derivatives_are_the_formulas(name: str) -> None:
    formula = np.vectorize(FORMULAS[name])
    x = X + 0.01  # relu has no derivative at 0
    with jax.enable_x64(True):
        y, slope = jax.jvp(ACTIVATIONS[name], (jnp.asarray(x),), (jnp.ones(x.shape),))
        np.testing.assert_allclose(y, formula(x), rtol=1e-12, atol=1e-15)
        want = (formula(x + STEP) - formula(x - STEP)) / (2 * STEP)
        np.testing.assert_allclose(slope, want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("name", "dtype"), by_turns(list(ACTIVATIONS), ["bfloat16", "float32"]))
def test_every_activation_has_a_backward_on_a_mesh(name: str, dtype: str) -> None:
    """Runs with `check_vma`, which some derivatives of JAX's functions fail."""
    _, metrics = traced(tiny.program(Layout(tp=2), activation=name, dtype=dtype)).out_info
    assert (metrics["loss"].shape, metrics["loss"].dtype) == ((), jnp.float32)
