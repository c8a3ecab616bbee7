"""Rotary positions in a `config.json`, interpreted as transformers does.

Source: transformers 5.24, `modeling_rope_utils.RotaryEmbeddingConfigMixin` (which of several keys
counts) and the functions of `ROPE_INIT_FUNCTIONS` (what each of them does).
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxptd.config import ModelConfig, option
from jaxptd.errors import UserError, quoted
from jaxptd.hf.families.family import count, number

Json = dict[str, Any]

THETA = 10000.0
PARAMETERS, SCALING, BASE = "rope_parameters", "rope_scaling", "rope_theta"
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, each with its rotation
LENGTH, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
KEYS = (PARAMETERS, SCALING, BASE, LENGTH, PARTIAL)  # all kinds that are supported

# Scaling -> the keys of the two ends of `rope.range`.
ENDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear": (),
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_slow", "beta_fast"),
    }
)
DEFAULTS: Mapping[str, float] = MappingProxyType({"beta_slow": 1.0, "beta_fast": 32.0})
_LENGTHS = ("attention_factor", "mscale", "mscale_all_dim")
# Scaling -> the keys that it reads.
_READ: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": (),
        "dynamic": ("factor", PARTIAL),
        "linear": ("factor", PARTIAL),
        "llama3": ("factor", LENGTH, PARTIAL, *ENDS["llama3"]),
        "yarn": ("factor", LENGTH, PARTIAL, *ENDS["yarn"], *_LENGTHS, "truncate"),
    }
)
_NONE: Json = {
    "rope.scaling": None,
    "rope.factor": None,
    "rope.original_length": None,
    "rope.range": None,
    "rope.attention_factor": None,
    "rope.truncate": None,
}


def read(config: Json) -> Json:
    """Our options of rotary positions.

    Args:
        config: content of a `config.json`, with `max_position_embeddings`.

    Raises:
        UserError: transformers rejects a value, or it belongs to a rotation that we lack.
    """
    values = _values(config)
    if nested := [key for key, value in values.items() if isinstance(value, dict)]:
        raise UserError(
            f"{PARAMETERS} has a separate object for {quoted(nested[0])}; use a model whose "
            "layers all have the same rotation"
        )
    kind, theta = _kind(values), number(BASE, values[BASE])
    fields = {"rope.theta": theta, **_NONE}
    if kind == "default":
        return fields
    if values.get(PARTIAL, 1.0) != 1:
        raise UserError(
            f"{PARTIAL}={quoted(values[PARTIAL])} with rope_type={kind}; use a model that rotates "
            "whole heads"
        )
    if kind == "dynamic":  # its angles change only beyond the last position
        number("factor", values.get("factor"))
        return fields
    fields |= {"rope.scaling": kind, "rope.factor": _factor(kind, values, config)}
    if ENDS[kind]:
        fields["rope.original_length"] = _whole(LENGTH, _length(values, config))
        fields["rope.range"] = tuple(
            number(key, values.get(key) or DEFAULTS.get(key)) for key in ENDS[kind]
        )
    return fields | (_yarn(values, fields["rope.factor"]) if kind == "yarn" else {})


def read_both(full: Json, sliding: Json) -> Json:
    """The options where layers with a window rotate by a base of their own.

    Args:
        full: as for `read`, with the rotation of layers without a window.
        sliding: with that of layers with one.

    Raises:
        UserError: as `read` does, or layers with a window have a scaling of their own.
    """
    options, near = read(full), read(sliding)
    if near == options:
        return options | {"rope.window_theta": None}
    if near["rope.scaling"]:
        raise UserError(
            f"{PARAMETERS} stretches {SLIDING} otherwise than {FULL}; use a model that stretches "
            "full layers only"
        )
    return options | {"rope.window_theta": near["rope.theta"]}


def remarks(config: Json) -> list[str]:
    """Lines about values without effect on the rotation, as in transformers."""
    values, sentences = _values(config), []
    if config.get(SCALING) and config.get(PARAMETERS):
        sentences = [f"{PARAMETERS} has no effect next to {SCALING}, as in transformers"]
    kind = _kind(values)
    if kind == "dynamic":
        longest = config.get("max_position_embeddings")
        sentences.append(
            f"rope_type=dynamic has no effect up to max_position_embeddings={longest}; beyond, "
            "transformers changes the angles and jaxptd does not"
        )
    known, same = ("rope_type", BASE, *_READ[kind]), {"type": kind, PARTIAL: 1}
    unread = {
        key: x for key, x in values.items() if key not in known and x not in (None, same.get(key))
    }
    if unread:
        names = ", ".join(f"{quoted(key)}={quoted(x)}" for key, x in unread.items())
        sentences.append(f"{names}: no effect with rope_type={kind}, as in transformers")
    return sentences


def _values(config: Json) -> Json:
    """The values from which transformers makes the rotation; `rope_scaling` takes precedence.

    Keys next to the object count if the object lacks them.
    """
    beside = {BASE: THETA} | {key: config[key] for key in (BASE, PARTIAL) if key in config}
    if beside.get(PARTIAL, 0) is None:
        del beside[PARTIAL]
    for key in (SCALING, PARAMETERS):
        given = config.get(key)
        if given is not None and not isinstance(given, dict):
            raise UserError(f"{key}={quoted(given)}; it must be an object")
    return beside | (config.get(SCALING) or config.get(PARAMETERS) or {})


def _kind(values: Json) -> str:
    """The kind of a rotation; `type` is its older name."""
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in _READ:
        raise UserError(f"rope_type={quoted(kind)}; use a model with one of {', '.join(_READ)}")
    return kind


def _length(values: Json, config: Json) -> Any:
    """The original length: first choice is the one next to the object, last the model's own."""
    positions = config.get("max_position_embeddings")
    return config.get(LENGTH, values.get(LENGTH, positions))


def _factor(kind: str, values: Json, config: Json) -> float:
    """Stretch of the positions; null for yarn is the ratio of the two lengths."""
    if kind == "yarn" and "factor" in values and values["factor"] is None:
        positions = number("max_position_embeddings", config.get("max_position_embeddings"))
        return positions / _whole(LENGTH, _length(values, config))
    return number("factor", values.get("factor"))


def _yarn(values: Json, factor: float) -> Json:
    """Where interpolation begins and ends, and the factor on rotated vectors, if not yarn's own."""
    return ({} if values.get("truncate", True) else {"rope.truncate": False}) | _lengthened(
        values, factor
    )


def _lengthened(values: Json, factor: float) -> Json:
    """The factor on rotated vectors, if it is not yarn's own."""
    given = {key: values.get(key) for key in _LENGTHS}
    if given["attention_factor"] is not None:
        return {"rope.attention_factor": number("attention_factor", given["attention_factor"])}
    if not (given["mscale"] and given["mscale_all_dim"]):
        return {}
    stretched = math.log(max(factor, 1.0))
    numerator, denominator = (0.1 * number(key, given[key]) * stretched + 1 for key in _LENGTHS[1:])
    return {"rope.attention_factor": numerator / denominator}


def _whole(key: str, value: Any) -> int:
    """A whole number, which files may also write as 8192.0."""
    return count(key, int(value) if isinstance(value, float) and value.is_integer() else value)


def write(model: ModelConfig) -> Json:
    """The keys of our options, in the form of transformers 4, which transformers 5 also reads."""
    kind = option(model, "rope.scaling")
    values = {BASE: option(model, "rope.theta"), SCALING: None}
    if kind is not None:
        ends = option(model, "rope.range") if ENDS[kind] else ()
        scaling = {"rope_type": kind, "factor": option(model, "rope.factor")}
        scaling |= {LENGTH: option(model, "rope.original_length")} if ends else {}
        length = option(model, "rope.attention_factor")
        scaling |= {} if length is None else {"attention_factor": length}
        scaling |= {"truncate": False} if option(model, "rope.truncate") is False else {}
        values[SCALING] = scaling | dict(zip(ENDS[kind], ends, strict=True))
    return values


def write_both(model: ModelConfig) -> Json:
    """The keys of our options, with an object for each kind of layer, as transformers 5 has it."""
    keys, near = write(model), option(model, "rope.window_theta")
    of_full = {BASE: keys[BASE], "rope_type": "default", **(keys[SCALING] or {})}
    of_window = of_full if near is None else {BASE: near, "rope_type": "default"}
    return keys | {SCALING: None, PARAMETERS: {FULL: of_full, SLIDING: of_window}}
