"""Statistics of the order of data: each window once per epoch, and no epoch like another.

Letters: W windows per epoch, E epochs.
"""

import math
from collections.abc import Iterator

import numpy as np

from benchmarks.draws.statistics import Row, all_shifts, chi_square, worst
from jaxptd.data.batches import ShuffledWindows

OF = "order of data"
LENGTH = 16  # tokens in a window
CELLS = 16  # of places, and of windows


def rows(windows: int, epochs: int) -> Iterator[Row]:
    """All tests of the order.

    Args:
        windows: W, a multiple of 16.
        epochs: E.
    """
    first_EW, shift_E = _epochs(windows, epochs, seed=0)
    draws = windows * epochs
    once = bool((np.sort(first_EW, axis=1) == np.arange(windows)).all())
    yield Row(OF, "each window once an epoch", draws, float(once))
    cell = windows // CELLS
    place_EW = np.broadcast_to(np.arange(windows), first_EW.shape)
    joint = (place_EW // cell * CELLS + first_EW // cell).ravel()
    counts = np.bincount(joint, minlength=CELLS**2)
    # Ignoring the order within cells, a permutation has (W - 1) / W of the variance.
    scaled = draws / CELLS**2 + (counts - draws / CELLS**2) * math.sqrt((windows - 1) / windows)
    fair = chi_square(scaled, draws / CELLS**2, (CELLS - 1) ** 2)
    yield Row(OF, "windows at each place of an epoch", draws, fair)
    rank_EW = _standard(first_EW)
    inside = [all_shifts(x, x, itself=True) for x in rank_EW]
    yield Row(OF, "neighbouring samples", draws, worst(inside))
    apart = [all_shifts(rank_EW[i], rank_EW[i + k]) for k in (1, 2) for i in range(epochs - k)]
    yield Row(OF, "consecutive epochs", 2 * draws, worst(apart))
    other_EW = _standard(_epochs(windows, epochs, seed=1)[0])
    seeds = [all_shifts(x, y) for x, y in zip(rank_EW, other_EW, strict=True)]
    yield Row(OF, "consecutive seeds", draws, worst(seeds))
    yield Row(OF, "shifts of the windows", epochs, _even(shift_E, 2 * LENGTH - 1))


def _epochs(windows: int, epochs: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The windows of each epoch in order, `[E, W]`, and the shift of each epoch, `[E]`."""
    tokens = np.arange((windows + 2) * LENGTH - 1)
    data = ShuffledWindows(tokens, LENGTH, vocab_size=len(tokens), seed=seed)
    assert data.windows_per_epoch == windows
    start_EW = data.starts(np.arange(windows * epochs)).reshape(epochs, windows)
    shift_E = start_EW.min(1)
    return (start_EW - shift_E[:, None]) // LENGTH, shift_E


def _standard(first_EW: np.ndarray) -> np.ndarray:
    """Ranks with mean 0 and variance 1."""
    windows = first_EW.shape[1]
    ranks: np.ndarray = (first_EW - (windows - 1) / 2) / math.sqrt((windows**2 - 1) / 12)
    return ranks


def _even(x: np.ndarray, size: int) -> float:
    """`chi_square` of values from 0 to size - 1, in 4 cells."""
    edges = np.floor(np.linspace(0, size, 5))
    counts = np.bincount(np.digitize(x, edges[1:-1]), minlength=4)
    return chi_square(counts, np.diff(edges) / size * x.size)
