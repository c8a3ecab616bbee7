"""Rotary positions in a `config.json`, as transformers 4 and 5 write them."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxptd.config import ModelConfig, option
from jaxptd.config.rope import yarn_length
from jaxptd.errors import UserError, quoted

Json = dict[str, Any]

THETA = 10000.0
LENGTH = "original_max_position_embeddings"
SCALES = ("mscale", "mscale_all_dim")
NAMES = (
    *("rope_scaling", "rope_factor", "rope_original_length", "rope_range"),
    "rope_attention_factor",
)

# Scaling -> the keys of the two ends of `rope_range`, and their values where they are missing.
ENDS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "linear": {},
        "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"beta_slow": 1.0, "beta_fast": 32.0},
    }
)


def read(config: Json) -> Json:
    """Our options of rotary positions.

    Keys that the kind of scaling does not read change nothing, as in transformers: `finetuned`,
    `attn_factor`, or a `factor` of the default kind. `rope_scaling` goes before `rope_parameters`.
    Source: transformers 5.24, `convert_rope_params_to_dict`, `_compute_yarn_parameters`.

    Raises:
        UserError: there is no such scaling here, or a value is none of its kind.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise UserError(f"{name}={quoted(given)}; it must be an object")
    kinds = config.get("layer_types")
    if nested := [key for key in given if isinstance(kinds, list) and key in kinds]:
        raise UserError(
            f"{name} differs by layer ({quoted(nested[0])}); use a model with one rotation for all"
        )
    kind = _first(given.get("rope_type"), given.get("type"), "default")
    if kind != "default" and kind not in tuple(ENDS):
        raise UserError(f"rope_type={quoted(kind)}; use a model with one of {', '.join(ENDS)}")
    part = _first(given.get("partial_rotary_factor"), config.get("partial_rotary_factor"), 1.0)
    if part != 1 or isinstance(part, bool):
        raise UserError(
            f"partial_rotary_factor={quoted(part)}; use a model that rotates whole heads, 1.0"
        )
    theta = _first(given.get("rope_theta"), config.get("rope_theta"), THETA)
    scaling = dict.fromkeys(NAMES) if kind == "default" else _scaling(kind, given, config)
    return {"rope_theta": _number("rope_theta", theta), **scaling}


def _scaling(kind: str, given: Json, config: Json) -> Json:
    """The options of a scaling."""
    ends: tuple[float, ...] | None = None
    length = None
    factor = given.get("factor")
    if ENDS[kind]:
        read = {key: _first(given.get(key), value) for key, value in ENDS[kind].items()}
        if kind == "yarn":  # where 0 is the default, too
            read = {key: value or ENDS[kind][key] for key, value in read.items()}
        ends = tuple(_number(key, value) for key, value in read.items())
        longest = config.get("max_position_embeddings")
        length = _whole(LENGTH, _first(config.get(LENGTH), given.get(LENGTH), longest))
        if factor is None and kind == "yarn" and "factor" in given:
            factor = _number("max_position_embeddings", longest) / length
    factor = _number("factor", factor)
    own = _attention_factor(given, factor) if kind == "yarn" else None
    return dict(zip(NAMES, (kind, factor, length, ends, own), strict=True))


def _attention_factor(given: Json, factor: float) -> float | None:
    """yarn's factor of turned vectors; None is that which follows from the factor."""
    if given.get("truncate") not in (None, True):
        raise UserError(
            f"truncate={quoted(given['truncate'])}; use a model with truncate=true, yarn's default"
        )
    found, scales = (
        given.get("attention_factor"),
        (given.get("mscale"), given.get("mscale_all_dim")),
    )
    if found is None and all(scales):
        one, all_dims = (_number(key, x) for key, x in zip(SCALES, scales, strict=True))
        found = (yarn_length(factor, one)) / (yarn_length(factor, all_dims))
    if found is None:
        return None
    found = _number("attention_factor", found)
    return None if math.isclose(found, yarn_length(factor), rel_tol=1e-12) else found


def _first(*values: Any) -> Any:
    """The first that is not null; else null."""
    return next((value for value in values if value is not None), None)


def _number(key: str, value: Any) -> float:
    """A number above 0. Raises UserError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{key}={quoted(value)}; it must be a number above 0")
    return float(value)


def _whole(key: str, value: Any) -> int:
    """A whole number above 0. Raises UserError for anything else."""
    if _number(key, value) != int(value):
        raise UserError(f"{key}={quoted(value)}; it must be a whole number")
    return int(value)


def write(model: ModelConfig) -> Json:
    """The keys of our options; those of transformers 4, which transformers 5 reads too."""
    kind = option(model, "rope_scaling")
    found = {"rope_theta": option(model, "rope_theta"), "rope_scaling": None}
    if kind is not None:
        ends = option(model, "rope_range") if ENDS[kind] else ()
        scaling = {"rope_type": kind, "factor": option(model, "rope_factor")}
        scaling |= {LENGTH: option(model, "rope_original_length")} if ends else {}
        own = option(model, "rope_attention_factor")
        scaling |= {} if own is None else {"attention_factor": own}
        found["rope_scaling"] = scaling | dict(zip(ENDS[kind], ends, strict=True))
    return found
