"""Fields of dataclasses that a user fills in, as YAML, options or Python: checked and converted.

`values` converts one value to the type of its field, `checks` does so for every field.
"""

from jaxptd.fields.checks import check_fields

__all__ = ["check_fields"]
