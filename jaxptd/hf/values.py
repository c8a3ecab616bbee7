"""Values of a `config.json`, of the types that transformers takes, or refused in a line."""

import math

from jaxptd.errors import UserError, quoted

LARGEST = 2**31 - 1  # of a whole number: sizes above it are mistakes, and are in no file


def count(key: str, value: object, least: int = 1) -> int:
    """A whole number. Raises UserError, with the key, for anything else and below `least`."""
    if type(value) is not int or value < least:
        span = f"above {least - 1}" if least else "of 0 or more"
        raise UserError(f"{key}={_shown(value)}; it must be a whole number {span}")
    if value > LARGEST:
        raise UserError(f"{key}={_shown(value)}; it must be {LARGEST} or less")
    return value


def number(key: str, value: object) -> float:
    """A number above 0. Raises UserError, with the key, for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{key}={_shown(value)}; it must be a number above 0")
    return float(value)


def flag(key: str, value: object) -> bool:
    """True or false. Raises UserError, with the key, for anything else."""
    if not isinstance(value, bool):
        raise UserError(f"{key}={_shown(value)}; it must be true or false")
    return value


def _shown(value: object) -> str:
    """A value for a message; a text has its quotes, as in the file: "2" is none of the number 2."""
    return f'"{quoted(value)}"' if isinstance(value, str) else quoted(value)
