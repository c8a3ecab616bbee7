"""Words and masks of dropout equal the reference's, bit for bit."""

import jax.numpy as jnp
import numpy as np
from reference.draws import fold as expected_fold
from reference.draws import pcg4d

from jaxptd.layers.dropout import fold, keep_mask

WORDS = np.random.default_rng(0).integers(0, 2**32, (4, 4096))
NUMBERS = WORDS[:2] % 5000


def test_seeds_are_folded_as_documented() -> None:
    found = fold(jnp.asarray(WORDS[2:].T, jnp.uint32), *jnp.asarray(NUMBERS, jnp.int32))
    expected = np.stack(expected_fold(tuple(WORDS[2:]), *NUMBERS), -1)
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_a_value_stays_if_its_word_is_at_least_the_rate() -> None:
    seed, numbers = jnp.asarray(WORDS[2:].T, jnp.uint32), jnp.asarray(NUMBERS, jnp.int32)
    word = pcg4d(*NUMBERS, *WORDS[2:])[3]
    for rate in (0.1, 0.5, float(word[7]) / 2**32):
        found = np.asarray(keep_mask(seed, *numbers, rate))
        np.testing.assert_array_equal(found, word >= round(rate * 2**32))
