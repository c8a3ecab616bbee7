"""Wavelengths of rotary positions, and the scalings that stretch them for longer texts.

Letters: H head size, P pairs of H.
Source: Su et al., arXiv 2104.09864; Peng et al., arXiv 2309.00071 (yarn); Llama 3.1 (llama3).
"""

import dataclasses
import math
from typing import Literal

import numpy as np

RopeScaling = Literal["linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Wavelengths of rotary positions; the fields are those of `ModelConfig`."""

    theta: float
    scaling: RopeScaling | None = None
    factor: float = 1.0
    original_length: int = 0
    range: tuple[float, float] = (0, 0)
    attention_factor: float | None = None


def frequencies(rope: Rope, size: int) -> tuple[np.ndarray, float]:
    """The angle of each pair at position 1, `[P]` in radians, and the factor of turned vectors."""
    turn_P = rope.theta ** -(np.arange(0, size, 2) / size)
    scaled_P = turn_P / rope.factor
    if rope.scaling in (None, "linear"):
        return scaled_P, 1.0
    low, high = rope.range
    if rope.scaling == "llama3":
        turns_P = rope.original_length * turn_P / (2 * math.pi)  # within the original length
        kept_P = np.clip((turns_P - low) / (high - low), 0, 1)
        return kept_P * turn_P + (1 - kept_P) * scaled_P, 1.0
    return _yarn(rope, turn_P, scaled_P, size)


def _yarn(
    rope: Rope, turn_P: np.ndarray, scaled_P: np.ndarray, size: int
) -> tuple[np.ndarray, float]:
    """Interpolates along the numbers of the pairs, and lengthens vectors, as published."""

    def pair_of(turns: float) -> float:  # the pair that makes so many turns in the original length
        length = rope.original_length / (2 * math.pi * turns)
        return size * math.log(length) / (2 * math.log(rope.theta))

    low, high = rope.range
    first, last = max(math.floor(pair_of(high)), 0), min(math.ceil(pair_of(low)), size - 1)
    number_P = np.arange(size // 2)
    scaled = np.clip((number_P - first) / ((last - first) or 1e-3), 0, 1)
    length = rope.attention_factor or 0.1 * math.log(max(rope.factor, 1)) + 1
    return scaled * scaled_P + (1 - scaled) * turn_P, length
