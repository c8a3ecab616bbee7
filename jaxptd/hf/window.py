"""Sliding windows in a `config.json`: of all layers, or of none.

In transformers a query sees itself and the `sliding_window - 1` tokens before it, as here.
Source: transformers 5.23, `masking_utils.sliding_window_overlay`, `models/mistral`, `models/qwen2`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxptd.config import ModelConfig, option
from jaxptd.errors import UserError, quoted

Json = dict[str, Any]

DEFAULT = 4096  # of a config without the key, which transformers leaves out at its default
FULL_LAYERS = 28  # Qwen's default of `max_window_layers`, the layers before those with a window


class Windows(NamedTuple):
    """Reads and writes the windows of a family.

    read: a `config.json` -> our option. write: our options -> its keys.
    """

    read: Callable[[Json], Json]
    write: Callable[[ModelConfig], Json]


def _read_always(config: Json) -> Json:
    return {"window": _checked(config.get("sliding_window", DEFAULT))}


def _write_always(model: ModelConfig) -> Json:
    return {"sliding_window": option(model, "window")}


def _read_layers(config: Json) -> Json:
    """Our window, if all layers have it, or none. Raises UserError if only some have it."""
    used = bool(config.get("use_sliding_window", False))
    window = _checked(config.get("sliding_window", DEFAULT)) if used else None
    windowed = _windowed(config, window)
    if not any(windowed):
        return {"window": None}
    if window is None:
        raise UserError("layer_types has sliding_attention without a window; use another model")
    if not all(windowed):
        raise UserError(f"sliding_window={window} in some layers only; use another model")
    return {"window": window}


def _windowed(config: Json, window: int | None) -> list[bool]:
    """Tells for each layer whether it has a window."""
    if config.get("layer_types"):
        return [kind == "sliding_attention" for kind in config["layer_types"]]
    first = config.get("max_window_layers", FULL_LAYERS)
    layers = config.get("num_hidden_layers", FULL_LAYERS + 4)
    return [window is not None and layer >= first for layer in range(layers)]


def _write_layers(model: ModelConfig) -> Json:
    window = option(model, "window")
    full = 0 if window else model.num_layers
    return {"use_sliding_window": bool(window), "sliding_window": window, "max_window_layers": full}


def _checked(window: Any) -> int | None:
    if window is not None and (type(window) is not int or window < 1):
        raise UserError(f"sliding_window={quoted(window)}; it must be a whole number above 0")
    return window


NEVER = Windows(lambda config: {}, lambda model: {})
ALWAYS = Windows(_read_always, _write_always)  # Mistral
BY_LAYER = Windows(_read_layers, _write_layers)  # Qwen
