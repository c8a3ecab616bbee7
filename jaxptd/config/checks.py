"""Checks of single values of a config. Each raises `UserError` with the remedy."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

from jaxptd.errors import UserError, quoted


def _require(
    words: str, allowed: Callable[[float], bool], section: str, config: Any, *names: str
) -> None:
    """Raises unless each of these fields is None or allowed. words: the range, for the message."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not allowed(value):
            raise UserError(f"{section}.{name}={quoted(value)} must be {words}")


require_positive = partial(_require, "a number above 0", lambda x: 0 < x < math.inf)
require_not_negative = partial(_require, "a number, 0 or more", lambda x: 0 <= x < math.inf)
require_below_one = partial(_require, "in [0, 1)", lambda x: 0 <= x < 1)


class Section:
    """A section of the model, which not every family has: a frozen dataclass."""

    def filled(self, values: Mapping[str, Any]) -> Self:
        """These options, those of a family, with the ones that a config gives."""
        named = {str(name): value for name, value in values.items()}  # 4 is no field either
        return dataclasses.replace(self, **named)  # type: ignore[type-var]

    @property
    def is_there(self) -> bool:
        """True if a model with these options has what the section describes."""
        return True


MOST_DROPPED = 0.9999999  # of dropout, whose masks compare 32-bit numbers


def require_share(section: str, config: Any, name: str) -> None:
    """Raises unless so large a share can be dropped."""
    require_below_one(section, config, name)
    if getattr(config, name) > MOST_DROPPED:
        raise UserError(
            f"{section}.{name}={getattr(config, name)} drops everything: masks are exact to "
            f"2**-32; use {MOST_DROPPED} or less"
        )


def require_not_empty(section: str, config: Any, *names: str) -> None:
    for name in names:
        if not getattr(config, name):
            raise UserError(f"{section}.{name} is empty; leave it out for its default, see --help")


def divisors(number: int) -> str:
    """Lists the first 12 divisors for a message; none above 4096, so that the search is quick."""
    numbers = (str(d) for d in range(1, min(number, 4096) + 1) if number % d == 0)
    return ", ".join(itertools.islice(numbers, 12))


def require_divides(what: str, number: int, axis: str, size: int) -> None:
    """Raises unless the field `axis`, a number of heads, divides that of the field `what`."""
    if number % size:
        below = number - number % size
        multiples = " or ".join(str(each) for each in (below, below + size) if each)
        raise UserError(
            f"{what}={number} does not split over {axis}={size}; use a {axis} that divides "
            f"{number} ({divisors(number)}), or {what}={multiples}"
        )
