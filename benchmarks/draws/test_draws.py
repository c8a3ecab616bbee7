"""Our draws pass the tests of randomness, and draws that are not random fail them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from benchmarks.draws import masking, spans
from benchmarks.draws.__main__ import main
from benchmarks.draws.initial import below
from benchmarks.draws.statistics import (
    all_shifts,
    chi_square,
    failing,
    normal_tail,
    pooled,
    uniform_bytes,
)
from jaxptd.data.objectives import MaskedPairs
from jaxptd.data.objectives import masking as own_masking
from jaxptd.data.objectives import spans as own_spans
from jaxptd.data.objectives.prepared import draw, shuffle

RNG = np.random.default_rng(0)


@pytest.mark.slow
def test_many_draws_pass(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    assert "WRONG" not in capsys.readouterr().out


def test_probabilities_of_chi_square_are_those_of_tables() -> None:
    """NIST's critical values for 5 degrees of freedom at 5 % and 95 %, and for 100 at 1 %."""
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


def test_neighbouring_cells_are_pooled_until_five_are_expected() -> None:
    counts, expected = pooled(np.array([80, 3, 1, 4, 5, 2, 5]), [80, 3, 3, 1, 5, 6, 2])
    assert counts.tolist() == [80, 4, 9, 7]
    assert expected.tolist() == pytest.approx([80, 6, 6, 8])


SAMPLES = {masking: 1024, spans: 5120}
OWN = {masking: own_masking, spans: own_spans}


def _without_seed(seed: int, number_B: np.ndarray, count: int) -> np.ndarray:
    return draw(0, number_B, count)


def _in_pairs(seed: int, number_B: np.ndarray, count: int) -> np.ndarray:
    return draw(seed, number_B // 2, count)


def _without_epoch(seed: int, number_B: np.ndarray, count: int) -> np.ndarray:
    return draw(seed, number_B % len(number_B), count)


def _one_draw_for_both(seed: int, number_B: np.ndarray, count: int) -> np.ndarray:
    drawn = draw(seed, number_B, count)
    drawn[:, spans.KEPT :] = drawn[:, : spans.CUT]
    return drawn


def _by_three_bits(drawn_BN: np.ndarray, last_BN: np.ndarray | None = None) -> np.ndarray:
    return shuffle(drawn_BN >> np.uint64(61) << np.uint64(61), last_BN)


@pytest.mark.parametrize(
    ("of", "module", "name", "weak", "what"),
    [
        *(
            (of, OWN[of], "draw", weak, what)
            for of in (masking, spans)
            for weak, what in (
                (_without_seed, "consecutive seeds"),
                (_in_pairs, "neighbouring samples"),
                (_without_epoch, "consecutive epochs"),
            )
        ),
        (masking, own_masking, "shuffle", _by_three_bits, "positions"),
        (
            masking,
            masking,
            "MaskedPairs",
            partial(MaskedPairs, masked=0.75),
            "masked, random, unchanged",
        ),
        (spans, own_spans, "shuffle", _by_three_bits, "ways to cut"),
        (spans, own_spans, "draw", _one_draw_for_both, "spans against the text between"),
    ],
)
def test_weaker_masks_and_spans_are_found(
    of: Any, module: Any, name: str, weak: Callable, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, weak)
    assert what in {row.what for row in failing([*of.rows(SAMPLES[of])])}
