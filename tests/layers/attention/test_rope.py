"""Rotary positions: scores depend on distances only, and scalings are as published."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxptd.config import ModelConfig, Rope
from jaxptd.config.block import frequencies, rotations
from jaxptd.layers.attention.self_attention import rotate

SIZE, THETA = 16, 1e4
TURNS = THETA ** -(np.arange(0, SIZE, 2) / SIZE)
LENGTH = 64
rotated = jax.jit(partial(rotate, turns=TURNS, length=1.0))  # (x, positions, numbers)


def llama3(factor: float, low: float, high: float) -> np.ndarray:
    """Interpolates by wavelength, pair by pair, as in the released code."""
    found = []
    for turn in TURNS:
        wave = 2 * math.pi / turn
        if wave < LENGTH / high:
            found.append(turn)
        elif wave > LENGTH / low:
            found.append(turn / factor)
        else:
            smooth = (LENGTH / wave - low) / (high - low)
            found.append((1 - smooth) * turn / factor + smooth * turn)
    return np.array(found)


def yarn(factor: float, low: float, high: float) -> np.ndarray:
    """Published for rotations r = L / wavelength: interpolated below low, kept above high.

    The ramp is linear in the index of the pair, between the pairs with those rotations, rounded
    outwards.
    """
    pair = [
        SIZE * math.log(LENGTH / (2 * math.pi * r)) / (2 * math.log(THETA)) for r in (high, low)
    ]
    first, last = max(math.floor(pair[0]), 0), min(math.ceil(pair[1]), SIZE - 1)
    kept = 1 - np.clip((np.arange(SIZE // 2) - first) / (last - first), 0, 1)
    return kept * TURNS + (1 - kept) * TURNS / factor


def test_frequencies_are_as_published() -> None:
    for rope, want, length in (
        (Rope(THETA), TURNS, 1.0),
        (Rope(THETA, "linear", 4.0), TURNS / 4, 1.0),
        (Rope(THETA, "llama3", 8.0, LENGTH, (1, 4)), llama3(8.0, 1, 4), 1.0),
        (Rope(THETA, "yarn", 4.0, LENGTH, (1, 32)), yarn(4.0, 1, 32), 0.1 * math.log(4) + 1),
    ):
        found, factor = frequencies(rope, SIZE)
        np.testing.assert_allclose(found, want, rtol=1e-12, err_msg=str(rope))
        assert factor == pytest.approx(length)


def test_a_layer_without_rotation_has_neither_angles_nor_a_factor() -> None:
    """Of four layers every second one rotates; those with a window are not stretched."""
    model = ModelConfig(
        family="llama",
        num_layers=4,
        hidden_size=2 * SIZE,
        num_heads=2,
        rope=Rope(THETA, "yarn", 4.0, LENGTH, window_theta=50.0, layers=(True, False)),
        window=3,
        window_layers=(False, False, True),
    )
    stretched, _ = frequencies(Rope(THETA, "yarn", 4.0, LENGTH), SIZE)
    near, _ = frequencies(Rope(50.0), SIZE)
    turns_LP, length_L = rotations(model)
    np.testing.assert_array_equal(turns_LP, [stretched, 0 * TURNS, near, 0 * TURNS])
    assert length_L == pytest.approx([0.1 * math.log(4) + 1, 1, 1, 1])


def test_scores_depend_on_distances_only() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 1, SIZE))
    numbers = jnp.arange(SIZE)

    def score(query: int, key: int) -> float:
        with jax.enable_x64(True):
            turned = (
                rotated(jnp.asarray(x), jnp.array([at]), numbers)
                for x, at in ((q, query), (k, key))
            )
            return float(jnp.vdot(*turned))

    assert score(5, 2) == pytest.approx(score(1005, 1002), rel=1e-10)
    assert score(5, 2) != pytest.approx(score(5, 3), rel=1e-3)


def test_a_slice_of_a_head_is_turned_as_in_the_whole_head() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 2, SIZE)), jnp.float32)
    positions = jnp.array([0, 7, 8])
    whole = rotated(x, positions, jnp.arange(SIZE))
    for first in range(0, SIZE, 4):
        numbers = jnp.arange(first, first + 4)
        part = rotated(x[..., numbers], positions, numbers)
        np.testing.assert_array_equal(part, whole[..., numbers])


def test_padding_is_not_turned() -> None:
    x = jnp.ones((1, 2, 1, 4), jnp.float32)
    numbers = jnp.arange(SIZE - 2, SIZE + 2)
    found = rotated(x, jnp.array([3, 4]), numbers)
    np.testing.assert_array_equal(found[..., 2:], x[..., 2:])
    assert not np.array_equal(found[..., :2], x[..., :2])
