"""Statistics of initial parameters: their distribution, and their independence.

Each value is a sum of twelve uniform ones, so its distribution is known exactly: Irwin-Hall.
Source: Johnson, Kotz and Balakrishnan, Continuous Univariate Distributions 2, section 26.9.
"""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import jax
import numpy as np

from benchmarks.draws.statistics import Row, all_shifts, chi_square, normal_tail, worst
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.mesh import Layout, make_mesh
from jaxptd.params import normal
from jaxptd.step import Program

OF = "initial values"
UNIFORM = 12  # terms of a sum; their variances add up to 1
EDGES = np.arange(-4.5, 4.75, 0.25)
FOURTH, SIXTH = 3 - 6 / 5 / UNIFORM, 15 - 15 * 6 / 5 / UNIFORM + 48 / 7 / UNIFORM**2  # moments


def below(x: float) -> float:
    """The probability of a sum below x standard deviations."""
    place = Fraction(x) + UNIFORM // 2
    terms = (
        (-1) ** k * math.comb(UNIFORM, k) * (place - k) ** UNIFORM
        for k in range(math.floor(place) + 1)
    )
    return float(sum(terms) / math.factorial(UNIFORM))


def rows(draws: int, width: int) -> Iterator[Row]:
    """All tests of initial values.

    Args:
        draws: how many values to draw from the distribution.
        width: hidden size of the model whose parameters are compared.
    """
    x = np.asarray(normal(1.0)(jax.random.key(1), (draws,)), np.float64)
    root = math.sqrt(draws)
    yield Row(OF, "mean", draws, normal_tail(x.mean() * root))
    spread = normal_tail((np.square(x).mean() - 1) * root / math.sqrt(FOURTH - 1))
    yield Row(OF, "variance", draws, spread)
    yield Row(OF, "third moment", draws, normal_tail((x**3).mean() * root / math.sqrt(SIXTH)))
    share = np.diff([0.0, *map(below, EDGES), 1.0])
    counts = np.bincount(np.searchsorted(EDGES, x, side="right"), minlength=share.size)
    yield Row(OF, "distribution, with its tails", draws, chi_square(counts, share * draws))
    yield Row(OF, "no value beyond 6 deviations", draws, float(np.abs(x).max() <= UNIFORM / 2))
    yield Row(OF, "neighbours", draws, all_shifts(x, x, itself=True))
    parts = _parts(width)
    pairs = [all_shifts(a, b) for a, b in itertools.combinations(parts, 2)]
    size = sum(part.size for part in parts)
    yield Row(OF, f"{len(parts)} parameters of layers", size, worst(pairs))


def _parts(width: int) -> list[np.ndarray]:
    """Equally many standardised values of each parameter of each layer, and of each table.

    They come from two consecutive seeds.
    """
    model = ModelConfig(
        num_layers=3, hidden_size=width, num_heads=4, seq_length=width, vocab_size=width
    )
    config = Config(model, Layout(), train=TrainConfig(platform="cpu"))
    program, found = Program(config, make_mesh(config.layout)), []
    draw = jax.jit(program.resolved.blueprint.make)
    for seed in (0, 1):
        drawn = jax.tree.leaves(draw(jax.random.key(seed)))
        for info, x in zip(program.infos.values(), drawn, strict=True):
            if info.decay:
                layers = np.asarray(x, np.float64).reshape(info.shape[0] if info.stack else 1, -1)
                found += [each[: width * width] / each.std() for each in layers]
    return found
