"""Single instructions against their formulas, and how many a kernel uses per element."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxptd.kernels.activation import FUSED, FusedActivation
from jaxptd.kernels.loss import FusedLoss
from jaxptd.kernels.norm import FusedNorm
from jaxptd.kernels.tile import Instructions, call, load, store

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_instructions_are_their_formulas(interpret: bool) -> None:
    drawn = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)

    def kernel(x: Any, y: Any, z: Any, *, run: Instructions) -> None:
        place = jnp.arange(512), None
        a, b, c = (load(x, ((row, place[0]), None)) for row in range(3))
        for row, found in enumerate((run.exp2(a), run.reciprocal(b), run.fma(a, b, c))):
            store(y, ((row, place[0]), None), found)
        store(z, place, run.fma(a, 2.0, -1.0))

    shapes = [jax.ShapeDtypeStruct((3, 512), F32), jax.ShapeDtypeStruct((512,), F32)]
    found, scaled = call(
        kernel, (jnp.asarray(drawn),), shapes, grid=(1,), warps=1, interpret=interpret
    )
    a, b, c = drawn.astype(np.float64)
    want = np.stack([2**a, 1 / b, a * b + c])
    # Within four units in the last place; a sum near zero, within the rounding of its terms.
    near = {"rtol": 4 * float(jnp.finfo(F32).eps), "atol": 4 * float(jnp.finfo(F32).eps)}
    np.testing.assert_allclose(found, want, **near)
    np.testing.assert_allclose(scaled, 2 * a - 1, **near)


def activated(h: Array, b: Array, dy: Array) -> Any:
    return jax.vjp(FusedActivation(FUSED["gelu-tanh"], gated=False), h, b)[1](dy)


def normalised(x: Array, w: Array, b: Array) -> Any:
    y, pull = jax.vjp(FusedNorm(1e-5, centred=True, beside=True), x, w, b)
    return pull(y)


def scored(x: Array, stop: Array, target: Array, row: Array) -> Any:
    rows = dict.fromkeys(("logsumexp_R", "d_sum_R", "d_target_R"), row)
    return FusedLoss().max_and_sum(x, stop), FusedLoss().gradient(x, stop, targets_R=target, **rows)


def inner(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program and of its inner programs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for each in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(each, "jaxpr") or hasattr(each, "eqns"):
                yield from inner(getattr(each, "jaxpr", each))


MOVES = {"masked_load", "masked_swap", "broadcast_in_dim", "jit", "pjit", "cond"}
SLOW = {"exp", "exp2", "log", "div", "rsqrt", "sqrt", "logistic", "tanh", "pow"}  # by XLA
ROW, VECTOR = jax.ShapeDtypeStruct((64,), F32), jax.ShapeDtypeStruct((768,), F32)
TOKENS, H = (jax.ShapeDtypeStruct((64, size), BF16) for size in (768, 4096))
SCORES = (H, jax.ShapeDtypeStruct((), I32), jax.ShapeDtypeStruct((64,), I32), ROW)


@pytest.mark.parametrize(
    ("function", "inputs", "most"),
    [
        # For each kernel, how many elements its text computes, and operations per element.
        (
            activated,
            (H, jax.ShapeDtypeStruct((4096,), F32), H),
            {"forward_kernel": (4 * 256, 9), "backward_kernel": (2 * 128, 17)},
        ),
        (
            normalised,
            (TOKENS, VECTOR, VECTOR),
            {"forward_kernel": (2 * 768, 5.7), "backward_kernel": (768, 14.7)},
        ),
        (
            scored,
            SCORES,
            # Two loops, over pieces with and without padding; a branch that few tiles take.
            {"sum_kernel": (2 * 8 * 512, 6.4), "gradient_kernel": (2048, 7)},
        ),
    ],
)
def test_kernels_take_few_instructions(
    function: Any, inputs: tuple[Any, ...], most: dict[str, tuple[int, float]]
) -> None:
    """Counts traced operations on full tiles, each of which is one or two instructions."""
    calls = [
        e for e in inner(jax.make_jaxpr(function)(*inputs).jaxpr) if "grid_mapping" in e.params
    ]
    assert len(calls) == len(most)
    for each in calls:
        name = each.params["name"]
        wide = [
            (eqn.primitive.name, eqn.outvars[0].aval.size)
            for eqn in inner(each.params["jaxpr"])
            if eqn.outvars and getattr(eqn.outvars[0].aval, "size", 0) > 8
            if eqn.outvars[0].aval.dtype == F32
        ]
        assert not SLOW & {operation for operation, _ in wide}
        numbers, budget = most[name]
        assert sum(size for operation, size in wide if operation not in MOVES) <= budget * numbers
