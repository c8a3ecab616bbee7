"""8-bit blocks: each element rounds to the nearest number, under any power of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxptd.kernels.rounding import FORWARD, Operand, in_blocks

rounded = jax.jit(in_blocks, static_argnums=1)


def drawn(*shape: int) -> np.ndarray:
    """Elements of every magnitude that e4m3 represents under one scale: 2**-13 to 1."""
    rng = np.random.default_rng(0)
    return rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(-13, 0, shape)


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("shape", [(256, 128), (3, 130, 200), (1, 1)], ids=str)
def test_every_element_is_rounded_to_the_next_number(rows: int, shape: tuple[int, ...]) -> None:
    x = drawn(*shape)
    x8 = rounded(jnp.asarray(x, jnp.float32), rows)
    assert x8.array.dtype == FORWARD
    assert x8.unit is not None
    assert x8.unit.shape == (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // 128))
    assert not (np.log2(x8.unit) % 1).any()
    error = np.abs(np.asarray(x8.values(rows), np.float64) / x - 1)
    assert error.max() <= 2.0**-4
    assert error.max() > 2.0**-5 or x.size == 1
    for place in np.ndindex(x8.unit.shape):
        *lead, row, column = place
        block = *lead, slice(row * rows, (row + 1) * rows), slice(column * 128, (column + 1) * 128)
        largest = np.abs(np.asarray(x8.array[block], np.float32)).max()
        assert 224 <= largest <= 448


@pytest.mark.parametrize("rows", [1, 128])
def test_parts_of_whole_blocks_are_those_of_the_whole(rows: int) -> None:
    """Shards rounded separately, as with tensor parallelism, equal the whole matrix rounded."""
    x = jnp.asarray(drawn(256, 512) * 2.0 ** (np.arange(512) // 64), jnp.float32)
    whole, parts = rounded(x, rows), [rounded(part, rows) for part in jnp.split(x, 2, 1)]
    for each, joined in zip(whole, zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(each, np.concatenate(joined, 1))


def test_parts_of_other_blocks_have_the_same_values() -> None:
    """Holds down to 2**-14 of a block's largest element."""
    x = jnp.asarray(drawn(8, 300), jnp.float32)
    parts = [rounded(part, 1).values(1) for part in jnp.split(x, 3, 1)]
    np.testing.assert_array_equal(np.concatenate(parts, 1), rounded(x, 1).values(1))


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    x = jnp.asarray(drawn(4, 200), jnp.float32).at[1, 130].set(jnp.nan).at[2, 3].set(jnp.inf)
    values = np.asarray(rounded(x, 1).values(1), np.float32)
    assert np.isnan(values[1, 128:]).all()
    assert np.isnan(values[2, 3])
    assert np.isfinite(values[[0, 3]]).all()


def test_zeros_are_zero() -> None:
    x8: Operand = rounded(jnp.zeros((2, 3)), 1)
    np.testing.assert_array_equal(x8.values(1), 0)
