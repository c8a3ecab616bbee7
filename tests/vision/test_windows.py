"""Strips of images on several devices against whole images on one: values and gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxptd.layers.dropout import TokenInfo
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.vision.losses import batch_dice_loss
from jaxptd.vision.windows import Strips

B, R = 8, 8
MESH = make_mesh(Layout(cp=4, tp=2))
STRIPS = Strips(Axis.CP, (Axis.TP,))  # tp divides the images, cp their rows
CUT, WHOLE = P(Axis.TP, Axis.CP), P((Axis.TP, Axis.CP))
X, DY = np.random.default_rng(0).standard_normal((2, B, R, R, 3)).astype(np.float32)


def on_mesh(fn: Callable, ins: Any, outs: Any) -> Callable:
    return jax.jit(jax.shard_map(fn, mesh=MESH, in_specs=ins, out_specs=outs, check_vma=True))


def hold(fn: Callable, plain: Callable, spec: P) -> None:
    """Asserts that fn on strips and plain on images have equal values and gradients.

    spec: sharding of fn's value.
    """
    wanted, vjp = jax.vjp(plain, jnp.asarray(X))
    dy = DY.reshape(-1)[: wanted.size].reshape(wanted.shape)

    def both(x: Array, dy: Array) -> tuple[Array, Array]:
        y, back = jax.vjp(fn, x)
        return y, back(dy)[0]

    found = on_mesh(both, (CUT, spec), (spec, CUT))(X, dy)
    for one, other in zip(found, (wanted, vjp(dy)[0]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by", [1, -1, 2, -2])
def test_rows_are_rolled_through_all_strips(by: int) -> None:
    hold(lambda x: STRIPS.rolled(x, by), lambda x: jnp.roll(x, by, 1), CUT)


def test_strips_become_whole_images_and_strips_again() -> None:
    hold(STRIPS.as_whole, lambda x: x, WHOLE)
    hold(lambda x: STRIPS.as_strips(STRIPS.as_whole(x), R // 4), lambda x: x, CUT)
    hold(lambda x: STRIPS.rolled(STRIPS.as_whole(x), 3), lambda x: jnp.roll(x, 3, 1), WHOLE)


def test_places_of_whole_images_are_those_of_their_samples_and_all_rows() -> None:
    def token_info(x: Array, position_T: Array) -> tuple[Array, Array]:
        given = TokenInfo(jnp.arange(B, dtype=jnp.int32), position_T, None)
        assert STRIPS.token_info(x, given) is given
        found = STRIPS.token_info(STRIPS.as_whole(x), given)
        own_B = found.sample_B.reshape(2, -1)[jax.lax.axis_index(Axis.TP)]
        return own_B, found.position_T

    sample_B, position_T = on_mesh(token_info, (CUT, P(Axis.CP)), (WHOLE, P()))(X, np.arange(R))
    np.testing.assert_array_equal(sample_B, np.arange(B))
    np.testing.assert_array_equal(position_T, np.arange(R))


@pytest.mark.parametrize("lies", ["strips", "whole"])
def test_means_of_images_count_once(lies: str) -> None:
    """All devices along cp hold the means of all images; only one device's counts."""
    turned = STRIPS.as_whole if lies == "whole" else lambda x: x

    def once(x: Array) -> Array:
        return jax.lax.psum(STRIPS.once(STRIPS.mean(turned(x)) ** 2), Axis.CP)

    hold(once, lambda x: x.mean((1, 2)) ** 2, P(Axis.TP))


def test_sums_and_rows_of_strips_are_those_of_images() -> None:
    hold(lambda x: STRIPS.summed(x.sum((1, 2))), lambda x: x.sum((1, 2)), P(Axis.TP))
    rows = on_mesh(lambda x: STRIPS.gathered(x)[None], CUT, P(Axis.CP, Axis.TP))(X)
    np.testing.assert_array_equal(rows, np.broadcast_to(X, (4, *X.shape)))


def test_the_dice_loss_of_a_batch_is_the_same_on_all_devices() -> None:
    """Devices along dp and tp hold its images, those along cp their rows."""
    label = np.random.default_rng(1).integers(-1, 3, (B, R, R)).astype(np.int32)
    cut = P((Axis.DP, Axis.TP), Axis.CP)

    def own(x: Array, label: Array) -> tuple[Array, Array]:
        loss, dx = jax.value_and_grad(batch_dice_loss)(x, label, STRIPS.summed_batch)
        return jax.lax.psum(loss, (Axis.DP, Axis.CP, Axis.TP)), dx

    mesh = make_mesh(Layout(dp=2, cp=2, tp=2))
    spread = jax.shard_map(
        own, mesh=mesh, in_specs=(cut, cut), out_specs=(P(), cut), check_vma=True
    )
    wanted = jax.jit(jax.value_and_grad(batch_dice_loss))(X, label)
    for one, other in zip(jax.jit(spread)(X, label), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
