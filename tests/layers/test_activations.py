"""Activations: their formulas and derivatives, and training with each of them on a mesh."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from turns import by_turns

from jaxptd.analysis.jaxprs import traced
from jaxptd.layers.mlp import ACTIVATIONS, clamped_swiglu, hidden_units
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


def test_a_clamped_gate_is_the_formula_with_the_slopes_of_clamps() -> None:
    """At a clamp itself the slope is that of the inside, as in torch."""
    gate, up = (x.ravel() for x in np.meshgrid(np.linspace(-9, 9, 37), np.linspace(-9, 9, 37)))
    g, u = np.minimum(gate, 7), np.clip(up, -7, 7)
    sigmoid = 1 / (1 + np.exp(-1.702 * g))
    slope = sigmoid * (1 + 1.702 * g * (1 - sigmoid))
    with jax.enable_x64(True):
        y, back = jax.vjp(clamped_swiglu, jnp.asarray(gate), jnp.asarray(up))
        dgate, dup = back(jnp.ones(gate.shape))
        np.testing.assert_allclose(y, g * sigmoid * (u + 1), rtol=1e-12)
        np.testing.assert_allclose(dgate, (gate <= 7) * slope * (u + 1), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(dup, (np.abs(up) <= 7) * g * sigmoid, rtol=1e-12)
        both = jnp.stack([jnp.asarray(gate), jnp.asarray(up)])
        np.testing.assert_array_equal(hidden_units("clamped-swiglu", gated=True)(both), y)


def test_a_clamped_gate_has_a_backward_on_a_mesh() -> None:
    choice = {"activation": "clamped-swiglu", "gated": True, "dtype": "bfloat16"}
    _, metrics = traced(tiny.program(Layout(tp=2), **choice)).out_info
    assert metrics["loss"].dtype == jnp.float32


@pytest.mark.parametrize(("name", "dtype"), by_turns(list(ACTIVATIONS), ["bfloat16", "float32"]))
def test_every_activation_has_a_backward_on_a_mesh(name: str, dtype: str) -> None:
    """Runs with `check_vma`, which some derivatives of JAX's functions fail."""
    _, metrics = traced(tiny.program(Layout(tp=2), activation=name, dtype=dtype)).out_info
    assert (metrics["loss"].shape, metrics["loss"].dtype) == ((), jnp.float32)
