"""Rotary positions, and how their waves are stretched for longer texts.

Letters: B batch, T position, N heads, H head size.

Source: Su et al., arXiv 2104.09864; Chen et al., arXiv 2306.15595 (linear); `apply_scaling` of
Llama 3.1's published model.py (llama3); Peng et al., arXiv 2309.00071, section 3, and their code,
which interpolates along the indices of the pairs (yarn).
"""

import dataclasses
import math

import numpy as np

from reference.tape import Value, einsum


@dataclasses.dataclass(frozen=True)
class Rope:
    """The waves of rotary positions.

    Args:
        theta: base of wavelengths.
        scaling: linear, llama3 or yarn; None without.
        factor: factor by which waves are stretched.
        original: length of texts before stretching, in tokens.
        few: waves that make at most this many turns in the original length are stretched fully.
        many: waves that make at least this many turns are left as they are.
        whole: whether yarn interpolates between whole pairs.
    """

    theta: float
    scaling: str | None = None
    factor: float = 1.0
    original: int = 0
    few: float = 1.0
    many: float = 4.0
    whole: bool = True


def angle(rope: Rope, pair: int, size: int) -> float:
    """The angle between neighbouring positions of one of a head's size / 2 pairs, in radians."""
    plain = rope.theta ** (-2 * pair / size)
    if rope.scaling is None:
        return plain
    share = {"linear": _all, "llama3": _by_wavelength, "yarn": _by_number}[rope.scaling]
    stretched = share(rope, pair, size)
    return stretched * plain / rope.factor + (1 - stretched) * plain


def _all(rope: Rope, pair: int, size: int) -> float:
    return 1.0


def _by_wavelength(rope: Rope, pair: int, size: int) -> float:
    """llama3: interpolates by how often the wave fits into a text of the original length."""
    wavelength = 2 * math.pi * rope.theta ** (2 * pair / size)
    if wavelength < rope.original / rope.many:
        return 0.0
    if wavelength > rope.original / rope.few:
        return 1.0
    return 1 - (rope.original / wavelength - rope.few) / (rope.many - rope.few)


def _by_number(rope: Rope, pair: int, size: int) -> float:
    """yarn: interpolates linearly from the pair that turns often to the one that turns rarely."""

    def turning(times: float) -> float:  # the pair with this many turns in the original text
        return size * math.log(rope.original / (2 * math.pi * times)) / 2 / math.log(rope.theta)

    down, up = (math.floor, math.ceil) if rope.whole else (float, float)
    first = max(down(turning(rope.many)), 0)
    last = min(up(turning(rope.few)), size - 1)
    if first == last:
        last += 0.001
    return min(max((pair - first) / (last - first), 0.0), 1.0)


def lengthening(rope: Rope) -> float:
    """The factor for rotated vectors: 1 except with yarn."""
    if rope.scaling != "yarn" or rope.factor <= 1:
        return 1.0
    return 0.1 * math.log(rope.factor) + 1


def rotated(x: Value, rope: Rope | None) -> Value:
    """Rotates each pair of neighbours in queries or keys[B, T, N, H] by its angle."""
    if rope is None:
        return x
    T, H = x.shape[1], x.shape[3]
    turns = np.zeros((T, H, H))
    for pair in range(H // 2):
        turned = np.arange(T) * angle(rope, pair, H)
        i, j = 2 * pair, 2 * pair + 1
        turns[:, i, i], turns[:, i, j] = np.cos(turned), np.sin(turned)
        turns[:, j, i], turns[:, j, j] = -np.sin(turned), np.cos(turned)
    return einsum("BTNH,THG->BTNG", x, turns * lengthening(rope))
