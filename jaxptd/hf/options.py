"""The fields of `ModelConfig` that stand for options of a Hugging Face model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxptd.config import ModelConfig
from jaxptd.errors import UserError

FIELDS = frozenset(field.name for field in dataclasses.fields(ModelConfig))
# Options of Hugging Face's models that `ModelConfig` does not have; only null is known here.
WITHOUT_FIELD = frozenset({"window"})


def model_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig` for options of a model, by the names of the fields.

    Raises:
        UserError: there is no such option here.
    """
    for name in WITHOUT_FIELD & options.keys():
        if options[name] is not None:
            raise UserError(f"{name}={options[name]}; this version of jaxptd has no {name}")
    return {name: value for name, value in options.items() if name in FIELDS}
