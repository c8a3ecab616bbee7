"""What is drawn passes the tests of randomness, and what is not random fails them."""

import numpy as np
import pytest

from benchmarks.draws.__main__ import all_rows, main
from benchmarks.draws.initial import below
from benchmarks.draws.statistics import all_shifts, chi_square, failing, normal_tail, uniform_bytes

RNG = np.random.default_rng(0)


def test_draws_pass() -> None:
    rows = all_rows(scale=4)
    assert len(rows) > 20
    assert failing(rows) == []


@pytest.mark.slow
def test_many_draws_pass(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    assert "WRONG" not in capsys.readouterr().out


def test_probabilities_of_chi_square_are_those_of_tables() -> None:
    """Critical values of 5 degrees of freedom at 5 % and 95 %, of 100 at 1 %: NIST's handbook."""
    for k, statistic, upper in ((5, 11.070, 0.05), (5, 1.145, 0.95), (100, 135.807, 0.01)):
        counts = np.ones(k + 1)
        counts[0] += statistic**0.5
        both = 2 * min(upper, 1 - upper)
        assert chi_square(counts, 1.0) == pytest.approx(both, rel=0.05)


def test_what_is_not_random_is_found() -> None:
    number = np.arange(2**16, dtype=np.uint32)
    words = number * np.uint32(1664525) + np.uint32(1013904223)
    assert uniform_bytes(words, 24) < 1e-9  # too even
    signs = np.sign(RNG.standard_normal(2**12))
    assert all_shifts(signs, np.roll(signs, 7)) < 1e-9
    again = np.where(RNG.random(2**12) < 0.15, np.roll(signs, 5), RNG.choice([-1, 1], 2**12))
    assert all_shifts(signs, again) < 1e-9
    assert all_shifts(signs, RNG.choice([-1.0, 1.0], 2**12)) > 1e-3
    assert normal_tail(6) < 1e-8


def test_the_distribution_of_sums_is_nearly_normal() -> None:
    assert (below(-6), below(0), below(6)) == (0, 0.5, 1)
    assert below(1) == pytest.approx(0.8413, abs=3e-3)
