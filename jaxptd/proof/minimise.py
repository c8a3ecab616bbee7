"""Reduces a case that fails to the fewest fields with values that are not plain."""

from collections.abc import Callable
from pathlib import Path

from jaxptd.config import Config
from jaxptd.proof.cases import try_made
from jaxptd.proof.compare import Ending
from jaxptd.proof.values import DRAWN, Values, plain

MOST = 80  # comparisons


def minimised(
    values: Values, folder: Path, compare: Callable[[Config], Ending]
) -> tuple[Values, Config]:
    """Sets fields to their plain values, one by one, while the case still ends as it did.

    Args:
        values: of a case that crashes or is unequal.
        folder: for tables of schedules.
        compare: compares a config with one device.

    Returns:
        the values that are left, and their config.
    """
    config = try_made(values, folder)
    assert isinstance(config, Config)
    wanted, left, changed = compare(config).outcome, MOST, True
    while changed and left > 0:
        changed = False
        for name in DRAWN:
            fewer = {**values, name: plain(name)}
            if fewer == values or left <= 0:
                continue
            smaller = try_made(fewer, folder)
            if isinstance(smaller, str):
                continue
            left -= 1
            if compare(smaller).outcome == wanted:
                values, config, changed = fewer, smaller, True
    return values, config
