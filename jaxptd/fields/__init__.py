"""Checks and converts values that a user gives, as YAML, options or Python.

`values` converts one value to a type; `checks` does so for every field of a dataclass and every
argument of a function.
"""

from jaxptd.fields.checks import (
    check_argument,
    check_fields,
    check_range,
    checked,
    meant_field,
    named_fields,
    refuse_unknown,
)
