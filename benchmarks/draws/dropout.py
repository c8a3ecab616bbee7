"""Statistics of dropout masks, and of the words that they are made from.

A mask is `keep_mask` of a seed, folded from step, layer, site, sample and head, and of two
counters: position and unit, or query and key. So its hash is tested with small consecutive
counters, and with small seeds as well.

Letters: P first counters, U second counters.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.draws.statistics import (
    Row,
    all_shifts,
    chi_square,
    normal_tail,
    uniform_bytes,
    worst,
)
from jaxptd.layers.dropout import fold, keep_mask

OF = "dropout"
RATES = (0.1, 0.5, 0.9)
# Words of a seed: small ones, and some as they occur in a step.
SEEDS = ((0, 0), (0, 1), (1, 0), (7, 11), (0x9E3779B9, 0x7F4A7C15), (0xDEADBEEF, 0x12345678))
ORDERS = 24  # of differences; without its shifts the hash is a polynomial of degree 16
FIRST_BIT, LAST_BIT = 12, 30  # of a word that changes; a multiplication leaves bit 31 as it is


# The two words of `fold`; `keep_mask` decides by the second.
_words, _mask = jax.jit(fold), jax.jit(keep_mask, static_argnums=3)


def _seed(words: tuple[int, int]) -> jax.Array:
    return jnp.array(words, jnp.uint32)


def _block(words: tuple[int, int], side: int) -> np.ndarray:
    number = jnp.arange(side, dtype=jnp.int32)
    return np.asarray(_words(_seed(words), number[:, None], number))


def rows(side: int) -> Iterator[Row]:
    """All tests of masks; side: P and U."""
    yield from _rates(side)
    blocks = [_block(words, side) for words in SEEDS]
    draws = len(SEEDS) * side * side
    for name, shift in (("upper", 24), ("lower", 0)):
        p = worst(uniform_bytes(x[..., k], shift) for x in blocks for k in (0, 1))
        yield Row(OF, f"{name} byte of a word", 2 * draws, p)
    yield Row(OF, f"differences of words, to order {ORDERS}", draws, _differences(blocks))
    yield _flips(side * side // 8)
    yield from _correlations(min(side, 512))


def _rates(side: int) -> Iterator[Row]:
    """Shares of dropped values: overall, in each row and in each column."""
    number, cells = jnp.arange(side, dtype=jnp.int32), side * side
    whole, lines = [], []
    for rate in RATES:
        variance = rate * (1 - rate)
        for words in SEEDS:
            drop = ~np.asarray(_mask(_seed(words), number[:, None], number, rate))
            whole.append(normal_tail((drop.sum() - cells * rate) / (cells * variance) ** 0.5))
            for axis in (0, 1):
                off = (drop.sum(axis) - side * rate) / np.sqrt(side * variance)
                lines.append(chi_square(off + 1.0, np.ones(1), off.size))  # sum of their squares
    draws = len(RATES) * len(SEEDS) * cells
    yield Row(OF, "rate", draws, worst(whole))
    yield Row(OF, "rate of each position, of each unit", draws, worst(lines))


def _differences(blocks: list[np.ndarray]) -> float:
    """Differences of neighbours, then of those, and so on: a polynomial's end at zero."""
    found = []
    for block in blocks:
        for axis in (0, 1):
            x = block[..., 1]
            for _ in range(ORDERS):
                x = np.diff(x, axis=axis)
                found.append(uniform_bytes(x, 24))
    return worst(found)


def _flips(draws: int) -> Row:
    """How words change when one bit of a counter or the seed does: all changes equally likely."""
    rng = np.random.default_rng(0)
    ends = np.array([4096, 4096, 2**32, 2**32])[:, None]
    words = rng.integers(0, ends, (4, draws)).astype(np.uint32)
    before, found = _hashed(words), []
    for word in range(4):
        for bit in range(FIRST_BIT, LAST_BIT + 1):
            moved = words.copy()
            moved[word] += np.uint32(2**bit)
            change = _hashed(moved) - before
            found += [uniform_bytes(change[..., k], 24) for k in (0, 1)]
    return Row(OF, "change of words with each bit", draws * len(found), worst(found))


def _hashed(words: np.ndarray) -> np.ndarray:
    first, second, *seed = jnp.asarray(words)
    return np.asarray(_words(jnp.stack(seed, -1), first, second))


def _correlations(side: int) -> Iterator[Row]:
    """Correlates masks that differ in one number, at all shifts of positions and units."""
    number = jnp.arange(side, dtype=jnp.int32)

    def mask(seed: int = 0, step: int = 0, **at: int) -> np.ndarray:
        key = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), step))
        folded = fold(key, at.get("layer", 0), at.get("site", 0))
        folded = fold(folded, at.get("sample", 0), at.get("head", 0))
        return np.where(_mask(folded, number[:, None], number, 0.5), 1.0, -1.0)

    base = mask()
    yield Row(OF, "neighbouring positions and units", side**2, all_shifts(base, base, itself=True))
    for name in ("seed", "step", "layer", "site", "sample", "head"):
        others = [mask(**{name: value}) for value in (1, 2, 3, 5)]
        pairs = [all_shifts(base, other) for other in others]
        pairs.append(all_shifts(others[0], others[1]))
        yield Row(OF, f"masks of each {name}", len(pairs) * side**2, worst(pairs))
