"""The options of a model by the names of their fields, whatever a config leaves to its family."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxptd.config import ModelConfig
from jaxptd.errors import UserError

FIELDS = frozenset(field.name for field in dataclasses.fields(ModelConfig))
ROPE = "rope_"
# Options of Hugging Face's models that `ModelConfig` does not have; only null is known here.
WITHOUT_FIELD = frozenset({"window"})


def option(model: ModelConfig, name: str) -> Any:
    """An option of a model: the field, or what stands for it where the field is null."""
    if name == "ffn_hidden_size":
        return model.mlp_size
    if name.startswith(ROPE):
        return getattr(model.block.rope, name.removeprefix(ROPE), None)
    return getattr(model.block, name, getattr(model, name, None))


def model_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig` for options of a model, by the names of the fields.

    Raises:
        UserError: there is no such option here.
    """
    for name in WITHOUT_FIELD & options.keys():
        if options[name] is not None:
            raise UserError(f"{name}={options[name]}; this version of jaxptd has no {name}")
    return {name: value for name, value in options.items() if name in FIELDS}
