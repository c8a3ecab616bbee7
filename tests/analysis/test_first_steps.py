"""First steps of an optimizer may differ by little more than rounding explains."""

import dataclasses

import jax
import numpy as np
import pytest
from turns import slow

from jaxptd.analysis.comparison import FirstSteps
from jaxptd.config import OptimizerConfig
from jaxptd.params import ParamInfo

NAME, SHAPE, EPS = "blocks.0.kv.w", (12, 2, 6), float(np.finfo(np.float32).eps)


def steps_of(name: str) -> FirstSteps:
    info = ParamInfo((1, *SHAPE), (1, *SHAPE), (None,) * 4, False, stack="blocks", matrix="srsc")
    return FirstSteps(OptimizerConfig(name=name), {"blocks.kv.w": info}, EPS)


def gradient(seed: int) -> dict[str, np.ndarray]:
    return {NAME: np.random.default_rng(seed).standard_normal(SHAPE)}


@pytest.mark.parametrize("seed", [0, 1, *map(slow, range(2, 8))])
def test_the_sums_of_whole_matrices_may_be_rounded_in_any_order(seed) -> None:
    """Permuting the rows gives the same step, computed with sums in another order."""
    muon, g = steps_of("muon"), gradient(seed)
    order = np.random.default_rng(seed).permutation(SHAPE[0])
    with jax.enable_x64(True):
        exact = np.asarray(muon._directions(g)[NAME])
        mixed = muon._directions({NAME: g[NAME][order].astype(np.float32)})[NAME]
    found = np.empty(SHAPE)
    found[order] = mixed
    allowed = muon.allowed(g, g)[NAME]
    assert np.max(np.abs(found - exact) / allowed) <= 1
    assert np.max(allowed) <= 1e-4 * np.max(np.abs(exact))


def test_finer_steps_may_differ_less() -> None:
    coarse = steps_of("muon")
    fine = dataclasses.replace(coarse, eps=float(np.finfo(np.float64).eps))
    g = gradient(0)
    assert np.max(fine.allowed(g, g)[NAME]) < 1e-8 * np.max(coarse.allowed(g, g)[NAME])
