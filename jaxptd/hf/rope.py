"""Rotary positions in a `config.json`, as transformers 4 and 5 write them."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxptd.config import ModelConfig, option
from jaxptd.errors import UserError, quoted

Json = dict[str, Any]

THETA = 10000.0
LENGTH = "original_max_position_embeddings"
NAMES = ("rope_scaling", "rope_factor", "rope_original_length", "rope_range")

# Scaling -> the keys of the two ends of `rope_range`, and their values where they are missing.
ENDS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "linear": {},
        "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"beta_slow": 1.0, "beta_fast": 32.0},
    }
)


def read(config: Json) -> Json:
    """Our options of rotary positions. Raises UserError for a scaling that there is not."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise UserError(f"rope_parameters={quoted(given)}; it must be an object")
    values = dict(given)
    kinds = {str(values.pop(key)) for key in ("rope_type", "type") if key in values} or {"default"}
    theta = {"rope_theta": values.pop("rope_theta", None) or config.get("rope_theta", THETA)}
    kind = kinds.pop()
    if kinds or (kind != "default" and kind not in ENDS):
        raise UserError(f"rope_type={quoted(kind)}; use a model with one of {', '.join(ENDS)}")
    scaling = None if kind == "default" else kind
    return {"rope_theta": _number(theta, "rope_theta", None), **_scaling(scaling, values, config)}


def _scaling(kind: str | None, values: Json, config: Json) -> Json:
    found: Json = dict.fromkeys(NAMES)
    if kind is not None:
        ends = tuple(_number(values, key, default) for key, default in ENDS[kind].items())
        length = values.pop(LENGTH, None) or config.get("max_position_embeddings")
        of_ends = (length, ends) if ends else (None, None)
        found = dict(zip(NAMES, (kind, _number(values, "factor", None), *of_ends), strict=True))
    if extra := [key for key, value in values.items() if value is not None]:
        raise UserError(f"rope_parameters has {quoted(extra[0])}; use a model without it")
    return found


def _number(values: Json, key: str, default: float | None) -> float:
    """Takes a number above 0 out of an object. Raises UserError for anything else."""
    found = values.pop(key, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise UserError(f"{key}={quoted(found)}; it must be a number above 0")
    return float(found)


def write(model: ModelConfig) -> Json:
    """The keys of our options; those of transformers 4, which transformers 5 reads too."""
    kind = option(model, "rope_scaling")
    found = {"rope_theta": option(model, "rope_theta"), "rope_scaling": None}
    if kind is not None:
        ends = option(model, "rope_range") if ENDS[kind] else ()
        scaling = {"rope_type": kind, "factor": option(model, "rope_factor")}
        scaling |= {LENGTH: option(model, "rope_original_length")} if ends else {}
        found["rope_scaling"] = scaling | dict(zip(ENDS[kind], ends, strict=True))
    return found
