"""Dropout masks, from the description in `docs/randomness.md`.

Threefry turns the seed and the step into two words of 32 bits; all masks are hashes of these.
Letters: B batch, T position, S key position, D model, N heads.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011 (threefry2x32, 20
rounds); Jarzynski and Olano, JCGT 9(3), 2020 (pcg4d).
"""

import dataclasses
from enum import IntEnum

import numpy as np

WORD = 2**32
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class DropoutSite(IntEnum):
    """Places in a layer where values are dropped, by their numbers."""

    EMBEDDING = 0
    PROBABILITIES = 1
    ATTENTION = 2
    MLP = 3
    CROSS_PROBABILITIES = 4
    CROSS = 5


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Two words from a key and a counter."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + keys[0]) % WORD, (counter[1] + keys[1]) % WORD
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            x = (x + y) % WORD
            y = ((y << bits | y >> (32 - bits)) % WORD) ^ x
        x = (x + keys[(group + 1) % 3]) % WORD
        y = (y + keys[(group + 2) % 3] + group + 1) % WORD
    return x, y


def pcg4d(*words: np.ndarray | int) -> list[np.ndarray]:
    """Mixes four words into four others; the arrays hold integers below 2**32 and broadcast."""
    v = [np.asarray(word, np.uint64) for word in np.broadcast_arrays(*words)]
    v = [(x * np.uint64(1664525) + np.uint64(1013904223)) % WORD for x in v]
    v = _products(v)
    v = [x ^ (x >> np.uint64(16)) for x in v]
    return _products(v)


def _products(v: list[np.ndarray]) -> list[np.ndarray]:
    x, y, z, w = v
    x = (x + y * w % WORD) % WORD
    y = (y + z * x % WORD) % WORD
    z = (z + x * y % WORD) % WORD
    w = (w + y * z % WORD) % WORD
    return [x, y, z, w]


Seed = tuple[np.ndarray | int, np.ndarray | int]


def fold(seed: Seed, first: np.ndarray | int, second: np.ndarray | int) -> Seed:
    """The seed for two numbers: the last two words of their hash with a seed."""
    *_, z, w = pcg4d(first, second, *seed)
    return z, w


@dataclasses.dataclass(frozen=True)
class Masks:
    """Factors for a step's values: 0 for those that are dropped, else 1 / (1 - rate).

    Args:
        seed: seed of the run.
        step: number of the step, from 0.
        rate: fraction of values dropped.
    """

    seed: int
    step: int
    rate: float

    def residual(self, layer: int, site: DropoutSite, shape: tuple[int, int, int]) -> np.ndarray:
        """Factors for x[B, T, D]: by sample, position and unit."""
        sample, position, unit = np.indices(shape)
        return self._factors(fold(self._at(layer, site), sample, 0), position, unit)

    def scores(self, layer: int, site: DropoutSite, shape: tuple[int, int, int, int]) -> np.ndarray:
        """Factors for probabilities[B, N, T, S]: by sample, head, query and key."""
        sample, head, query, key = np.indices(shape)
        return self._factors(fold(self._at(layer, site), sample, head), query, key)

    def _at(self, layer: int, site: DropoutSite) -> Seed:
        step = threefry(threefry_key(self.seed), (0, self.step))
        return fold(step, layer, site)

    def _factors(self, seed: Seed, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        *_, word = pcg4d(first, second, *seed)
        return np.where(word < round(self.rate * WORD), 0, 1 / (1 - self.rate))


def threefry_key(seed: int) -> tuple[int, int]:
    """The upper and the lower half of a seed."""
    return seed // WORD, seed % WORD
