"""The options of a model by the names of their fields, whatever a config leaves to its family."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxptd.config import ModelConfig

FIELDS = frozenset(field.name for field in dataclasses.fields(ModelConfig))
ROPE = "rope_"


def option(model: ModelConfig, name: str) -> Any:
    """An option of a model: the field, or what stands for it where the field is null."""
    if name == "ffn_hidden_size":
        return model.mlp_size
    if name.startswith(ROPE):
        return getattr(model.block.rope, name.removeprefix(ROPE), None)
    return getattr(model.block, name, getattr(model, name, None))


def model_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig` for options of a model, by the names of the fields."""
    return {name: value for name, value in options.items() if name in FIELDS}
