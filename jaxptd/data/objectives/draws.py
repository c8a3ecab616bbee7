"""Random numbers of samples, as a pure function of the seed and the sample number.

Sample n has a range of the counter of one Philox stream for itself, so a run of samples is one call
for all of them. The raw output of Philox never changes (numpy enhancement proposal 19).

Letters: B samples, N numbers of each.
"""

import numpy as np

from jaxptd.errors import UserError

OF_OBJECTIVES = 2**63 + 2**62  # epochs and mixtures, which Philox is keyed with too, have smaller
STEP = 4  # numbers that Philox makes for one count
LONGEST = 2**20  # places that can be shuffled
PLACES = np.uint64(LONGEST - 1)  # low bits of a key, which have its place


def check_window(window: int) -> None:
    """Raises UserError for more tokens of a sample than can be shuffled."""
    if window > LONGEST:
        raise UserError(
            f"model.seq_length makes samples of {window} tokens, {LONGEST} can be shuffled; use a "
            "smaller one"
        )


def draw(seed: int, number_B: np.ndarray, count: int) -> np.ndarray:
    """Draws `count` numbers of 64 bits for each sample, uint64[B, count]."""
    key = np.array([seed, OF_OBJECTIVES], dtype=np.uint64)
    steps = -(-count // STEP)
    drawn = np.empty((len(number_B), STEP * steps), dtype=np.uint64)
    breaks = np.flatnonzero(np.diff(number_B) != 1) + 1
    for run in np.split(np.arange(len(number_B)), breaks) if len(number_B) else ():
        philox = np.random.Philox(key=key, counter=int(number_B[run[0]]) * steps)
        drawn[run[0] : run[-1] + 1] = philox.random_raw(run.size * STEP * steps).reshape(
            run.size, -1
        )
    return drawn[:, :count]


def shuffle(drawn_BN: np.ndarray, last_BN: np.ndarray | None = None) -> np.ndarray:
    """Numbers -> the places 0 to N - 1 of each row in random order, int64[B, N].

    The upper 44 bits of a number decide; equal ones are in the order of their places.

    Args:
        drawn_BN: from `draw`; N up to LONGEST.
        last_BN: True for places that come behind all others.
    """
    keys_BN = drawn_BN if last_BN is None else np.where(last_BN, ~np.uint64(0), drawn_BN)
    places_N = np.arange(drawn_BN.shape[1], dtype=np.uint64)
    return (np.sort(keys_BN & ~PLACES | places_N, axis=1) & PLACES).astype(np.int64)
