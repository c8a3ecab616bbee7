"""Sliding windows in a `config.json`: of all layers, or of none.

In transformers a query sees itself and the `sliding_window - 1` tokens before it, as here.
Source: transformers 5.23, `masking_utils.sliding_window_overlay`, `models/mistral`, `models/qwen2`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxptd.config import ModelConfig, option
from jaxptd.errors import UserError, quoted
from jaxptd.hf.values import count, flag

Json = dict[str, Any]

DEFAULT = 4096  # of a config without the key, which transformers leaves out at its default
_KINDS = ("sliding_attention", "full_attention")
FULL_LAYERS = 28  # Qwen's default of `max_window_layers`, the layers before those with a window


class Windows(NamedTuple):
    """Reads and writes the windows of a family.

    read: a `config.json` -> our option. write: our options -> its keys.
    """

    read: Callable[[Json], Json]
    write: Callable[[ModelConfig], Json]


def _read_never(config: Json) -> Json:
    """No option. Raises UserError if the file speaks of windows that the model cannot have."""
    if _KINDS[0] in (_layer_types(config) or ()):
        raise UserError(f"layer_types has {_KINDS[0]}, and this model has no window; use another")
    return {}


def _read_always(config: Json) -> Json:
    """The window of all layers; with `layer_types` transformers reads a Mistral as a Ministral."""
    window, kinds = _checked(config.get("sliding_window", DEFAULT)), _layer_types(config)
    layers = count("num_hidden_layers", config["num_hidden_layers"])
    default = 0 if window is None else layers
    return _of_layers(window, default if kinds is None else kinds.count(_KINDS[0]), layers)


def _write_always(model: ModelConfig) -> Json:
    return {"sliding_window": option(model, "window")}


def _read_layers(config: Json) -> Json:
    """Our window, if all layers have it, or none."""
    used = flag("use_sliding_window", config.get("use_sliding_window", False))
    window = _checked(config.get("sliding_window", DEFAULT)) if used else None
    layers = count("num_hidden_layers", config["num_hidden_layers"])
    return _of_layers(window, _windowed(config, window, layers), layers)


def _of_layers(window: int | None, windowed: int, layers: int) -> Json:
    """Our window, where so many layers have it. Raises UserError if only some have it."""
    if not windowed:
        return {"window": None}
    if window is None:
        raise UserError("layer_types has sliding_attention without a window; use another model")
    if windowed < layers:
        raise UserError(f"sliding_window={window} in some layers only; use another model")
    return {"window": window}


def _windowed(config: Json, window: int | None, layers: int) -> int:
    """The number of layers that have a window."""
    kinds, first = _layer_types(config), config.get("max_window_layers", FULL_LAYERS)
    if type(first) is not int:
        raise UserError(f"max_window_layers={quoted(first)}; it must be a whole number")
    if kinds is None:
        return 0 if window is None else max(layers - max(first, 0), 0)
    return kinds.count(_KINDS[0])


def _layer_types(config: Json) -> list[str] | None:
    """The kind of attention of each layer, if the file says it."""
    kinds = config.get("layer_types")
    layers = count("num_hidden_layers", config["num_hidden_layers"])
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or any(x not in _KINDS for x in kinds):
        raise UserError(
            f"layer_types={quoted(kinds)}; it must be a list with one of {', '.join(_KINDS)} for "
            f"each of {layers} layers"
        )
    return kinds


def _write_layers(model: ModelConfig) -> Json:
    window = option(model, "window")
    full = 0 if window else model.num_layers
    return {"use_sliding_window": bool(window), "sliding_window": window, "max_window_layers": full}


def _checked(window: Any) -> int | None:
    return None if window is None else count("sliding_window", window)


NEVER = Windows(_read_never, lambda model: {})
ALWAYS = Windows(_read_always, _write_always)  # Mistral
BY_LAYER = Windows(_read_layers, _write_layers)  # Qwen
