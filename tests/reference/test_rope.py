"""Angles of rotary positions equal those of the published formulas."""

import itertools

import numpy as np
import pytest
from reference.rope import Rope as Expected
from reference.rope import angle, lengthening

from jaxptd.config.block import Rope, frequencies

RANGES = ((1.0, 4.0), (1.0, 32.0), (1.5, 6.0))
LENGTHS = (1, 4, 64, 8192)  # no wave makes a turn in the shortest, which reverses yarn's ramp


@pytest.mark.parametrize(
    ("scaling", "truncate"),
    [(None, None), ("linear", None), ("llama3", None), ("yarn", None), ("yarn", False)],
)
def test_angles_are_those_of_the_reference(scaling, truncate) -> None:
    for size, theta, factor in itertools.product((2, 16, 128), (20.0, 5e5), (1.0, 4.0, 8.0)):
        for original, (few, many) in itertools.product(LENGTHS, RANGES):
            wide = factor if scaling else 1.0
            expected = Expected(theta, scaling, wide, original, few, many, truncate is None)
            rope = Rope(theta, scaling, wide, original, (few, many), truncate=truncate)
            found, length = frequencies(rope, size)
            angles = [angle(expected, pair, size) for pair in range(size // 2)]
            np.testing.assert_allclose(found, angles, rtol=1e-14)
            assert length == pytest.approx(lengthening(expected), rel=1e-15)
