"""The options of a model as this version has them: the one place that knows which there are.

Sizes of Hugging Face's models are written with all options; those that `ModelConfig` does not have
must be as in its only model, GPT-2.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from jaxptd.config import ModelConfig
from jaxptd.errors import UserError

FIELDS = frozenset(field.name for field in dataclasses.fields(ModelConfig))
ROPE = "rope_"

# Options without a field, as the model has them.
WITHOUT_FIELD: Mapping[str, Any] = types.MappingProxyType(
    {
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "activation": "gelu-tanh",
        "gated": False,
        "linear_bias": "all",
        "positions": "learned",
        "qk_norm": False,
    }
)


def option(model: ModelConfig, name: str) -> Any:
    """An option of a model: the field, or what stands for it where the field is null."""
    if name == "ffn_hidden_size":
        return model.mlp_size
    block = getattr(model, "block", model)  # has the options of a block that a family fills in
    if name.startswith(ROPE):
        return getattr(getattr(block, "rope", None), name.removeprefix(ROPE), None)
    if name == "num_kv_heads" and not hasattr(block, name):
        return model.num_heads
    return getattr(block, name, getattr(model, name, WITHOUT_FIELD.get(name)))


def model_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig` for options of a model, by the names of the fields.

    Raises:
        UserError: the family, or an option, is none that this version has.
    """
    families = typing.get_args(typing.get_type_hints(ModelConfig)["family"])
    if options["family"] not in families:
        raise UserError(
            f"a model of family {options['family']}; this version of jaxptd has "
            f"{', '.join(families)}"
        )
    fields = {name: value for name, value in options.items() if name in FIELDS}
    model = ModelConfig(**fields)
    for name in options.keys() - FIELDS - {"max_positions"}:
        asked, here = options[name], option(model, name)
        if asked is not None and asked != here:
            raise UserError(f"{name}={asked}; this version of jaxptd has {name}={here} only")
    return fields
