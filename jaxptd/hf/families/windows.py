"""Sliding windows in a `config.json`, if all layers have the same one.

In transformers, as here, a query sees itself and the `sliding_window - 1` tokens before it.

Sources: `configuration_*.py` of each family, and `masking_utils.sliding_window_overlay` of
transformers 5.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxptd.config import ModelConfig, option
from jaxptd.errors import UserError, quoted
from jaxptd.hf.families.family import Json, Keys, count, flag

DEFAULT = 4096  # default of a key that transformers then leaves out
_SLIDING, _FULL = "sliding_attention", "full_attention"
USED, WINDOW, FULL_LAYERS = "use_sliding_window", "sliding_window", "max_window_layers"
DEFAULT_FULL = 28  # Qwen's default for `max_window_layers`

# (layers, `max_window_layers`) -> how many layers have a window unless `layer_types` says so.
Windowed = Callable[[int, int], int]


def _read_never(config: Json) -> Json:
    """No option. Raises UserError if the file names windows that the model cannot have."""
    if _SLIDING in (_layer_types(config) or ()):
        raise UserError(
            f"layer_types has {_SLIDING}, but this model has no window; use another model"
        )
    return {}


def _read_always(config: Json) -> Json:
    """The window of all layers; with `layer_types` transformers reads a Mistral as a Ministral."""
    window, kinds = _checked(config.get(WINDOW, DEFAULT)), _layer_types(config)
    layers = count("num_hidden_layers", config["num_hidden_layers"])
    default = 0 if window is None else layers
    return _of_layers(window, default if kinds is None else kinds.count(_SLIDING), layers)


def _read_every(config: Json, *, usual: int | None) -> Json:
    """The window of all layers, whatever `layer_types` says; usual: if the key is missing."""
    return {"window": _checked(config.get(WINDOW, usual))}


def _read_if_used(config: Json, *, read: Callable[[Json], Json]) -> Json:
    """Reads no window unless `use_sliding_window` is true, else as `read` does."""
    used = flag(USED, config.get(USED, False))
    return read(config if used else config | {WINDOW: None})


def _read_layers(config: Json, *, windowed: Windowed, full_layers: int = DEFAULT_FULL) -> Json:
    """Our window if all layers have it, None if no layer does.

    Args:
        config: the file's.
        windowed: how many layers have a window if the file does not list them.
        full_layers: if `max_window_layers` is missing.
    """
    window, kinds = _checked(config.get(WINDOW, DEFAULT)), _layer_types(config)
    layers = count("num_hidden_layers", config["num_hidden_layers"])
    first = config.get(FULL_LAYERS, full_layers)
    if type(first) is not int:
        raise UserError(f"{FULL_LAYERS}={quoted(first)}; it must be a whole number")
    if kinds is not None:
        return _of_layers(window, kinds.count(_SLIDING), layers)
    return _of_layers(window, 0 if window is None else windowed(layers, max(first, 0)), layers)


def _last_layers(layers: int, full: int) -> int:
    """The number of layers behind the first `full` ones."""
    return max(layers - full, 0)


def _every_second(layers: int, first: int) -> int:
    """Counts every other layer of the `first` ones: so transformers reads a Qwen 2 MoE."""
    return (min(layers, first) + 1) // 2


def _of_layers(window: int | None, windowed: int, layers: int) -> Json:
    """Our window, given how many layers have it. Raises UserError if only some do."""
    if not windowed:
        return {"window": None}
    if window is None:
        raise UserError(f"layer_types has {_SLIDING} without a window; use another model")
    if windowed < layers:
        raise UserError(f"{WINDOW}={window} in some layers only; use another model")
    return {"window": window}


def _layer_types(config: Json) -> list[str] | None:
    """The kind of attention of each layer, if the file lists it."""
    kinds = config.get("layer_types")
    layers = count("num_hidden_layers", config["num_hidden_layers"])
    if kinds is None:
        return None
    known = (_SLIDING, _FULL)
    if not isinstance(kinds, list) or len(kinds) != layers or any(x not in known for x in kinds):
        raise UserError(
            f"layer_types={quoted(kinds)}; it must be a list with one of {', '.join(known)} for "
            f"each of {layers} layers"
        )
    return kinds


def _checked(window: Any) -> int | None:
    return None if window is None else count(WINDOW, window)


def _write_window(model: ModelConfig) -> Json:
    return {WINDOW: option(model, "window")}


def _write_used(model: ModelConfig) -> Json:
    return {USED: bool(option(model, "window")), **_write_window(model)}


def _write_layers(model: ModelConfig) -> Json:
    full = 0 if option(model, "window") else model.num_layers
    return _write_used(model) | {FULL_LAYERS: full}


def _write_types(model: ModelConfig) -> Json:
    kind = _SLIDING if option(model, "window") else _FULL
    return {"layer_types": [kind] * model.num_layers}


def _if_used(read: Callable[[Json], Json]) -> Callable[[Json], Json]:
    return partial(_read_if_used, read=read)


NEVER = Keys(_read_never, lambda model: {})
ALWAYS = Keys(_read_always, _write_window)  # Mistral
EVERY = Keys(partial(_read_every, usual=None), _write_window)  # Mixtral
EVERY_IF_USED = Keys(_if_used(partial(_read_every, usual=DEFAULT)), _write_used)  # Qwen 3 MoE
BY_LAYER = Keys(_if_used(partial(_read_layers, windowed=_last_layers)), _write_layers)  # Qwen
ALTERNATING = Keys(  # Qwen 2 MoE
    _if_used(partial(_read_layers, windowed=_every_second)),
    lambda model: _write_used(model) | _write_types(model),
)
BY_TYPE = Keys(  # dots1
    partial(_read_layers, windowed=_last_layers, full_layers=62),
    lambda model: _write_window(model) | _write_types(model),
)
