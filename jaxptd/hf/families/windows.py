"""Sliding windows in a `config.json`: of all layers, of some, or of none.

In transformers, as here, a query sees itself and the `sliding_window - 1` tokens before it.

Sources: `configuration_*.py` of each family, and `masking_utils.sliding_window_overlay` of
transformers 5.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxptd.config import ModelConfig, option
from jaxptd.config.patterns import period_of
from jaxptd.errors import UserError, quoted
from jaxptd.hf.families import rope
from jaxptd.hf.families.family import Json, Keys, count, flag

DEFAULT = 4096  # default of a key that transformers then leaves out
_SLIDING, _FULL = rope.SLIDING, rope.FULL
USED, WINDOW, FULL_LAYERS = "use_sliding_window", "sliding_window", "max_window_layers"
PATTERN, DEFAULT_PATTERN = "sliding_window_pattern", 6
DEFAULT_FULL = 28  # Qwen's default for `max_window_layers`

# (layers, `max_window_layers`) -> which layers have a window unless `layer_types` says so.
Windowed = Callable[[int, int], list[bool]]


def _read_never(config: Json) -> Json:
    """No option. Raises UserError if the file names windows that the model cannot have."""
    if _SLIDING in (_layer_types(config) or ()):
        raise UserError(
            f"layer_types has {_SLIDING}, but this model has no window; use another model"
        )
    return {}


def _read_always(config: Json) -> Json:
    """The window of all layers; with `layer_types` transformers reads a Mistral as a Ministral."""
    return _read_layers(config, windowed=lambda layers, full: [True] * layers)


def _read_every(config: Json, *, usual: int | None) -> Json:
    """The window of all layers, whatever `layer_types` says; usual: if the key is missing."""
    return {"window": _checked(config.get(WINDOW, usual))}


def _read_if_used(config: Json, *, read: Callable[[Json], Json]) -> Json:
    """Reads no window unless `use_sliding_window` is true, else as `read` does."""
    used = flag(USED, config.get(USED, False))
    return read(config if used else config | {WINDOW: None})


def _read_layers(config: Json, *, windowed: Windowed, full_layers: int = DEFAULT_FULL) -> Json:
    """Our window, and which layers have it.

    Args:
        config: the file's.
        windowed: which layers have a window if the file does not list them.
        full_layers: if `max_window_layers` is missing.

    Raises:
        UserError: a value is wrong, or layers have a window that the file does not give.
    """
    window, kinds = _checked(config.get(WINDOW, DEFAULT)), _layer_types(config)
    layers = count("num_hidden_layers", config["num_hidden_layers"])
    first = config.get(FULL_LAYERS, full_layers)
    if type(first) is not int:
        raise UserError(f"{FULL_LAYERS}={quoted(first)}; it must be a whole number")
    if kinds is not None:
        each = [kind == _SLIDING for kind in kinds]
    else:
        each = windowed(layers, max(first, 0)) if window is not None else [False]
    if not any(each):
        return {"window": None, "window_layers": None}
    if window is None:
        raise UserError(f"layer_types has {_SLIDING} without a window; use another model")
    return {"window": window, "window_layers": period_of(tuple(each))}


def _read_pattern(config: Json) -> Json:
    """The window, and which layers have it: all but each n-th, if the file does not list them."""
    period = count(PATTERN, config.get(PATTERN, DEFAULT_PATTERN))
    return _read_layers(
        config, windowed=lambda layers, full: [bool((i + 1) % period) for i in range(layers)]
    )


def _last_layers(layers: int, full: int) -> list[bool]:
    """The layers behind the first `full` ones."""
    return [layer >= full for layer in range(layers)]


def _every_second(layers: int, first: int) -> list[bool]:
    """Every other layer of the `first` ones: so transformers reads a Qwen 2 MoE."""
    return [layer < first and layer % 2 == 0 for layer in range(layers)]


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
    """`max_window_layers`, with `layer_types` if only some layers have the window."""
    if option(model, "window") and not all(model.windowed):
        full = model.windowed.index(True)
        return _write_used(model) | {FULL_LAYERS: full} | _write_types(model)
    return _write_used(model) | {FULL_LAYERS: 0 if option(model, "window") else model.num_layers}


def _write_types(model: ModelConfig) -> Json:
    each = model.windowed if option(model, "window") else [False] * model.num_layers
    return {"layer_types": [_SLIDING if windowed else _FULL for windowed in each]}


def _write_always(model: ModelConfig) -> Json:
    """The window, with `layer_types` if only some layers have it."""
    types = {} if all(model.windowed) else _write_types(model)
    return _write_window(model) | types


def _if_used(read: Callable[[Json], Json]) -> Callable[[Json], Json]:
    return partial(_read_if_used, read=read)


OF_ALL: Json = {"window_layers": None}  # option of a family whose layers all have the same window
NEVER = Keys(_read_never, lambda model: {})
ALWAYS = Keys(_read_always, _write_always)  # Mistral
EVERY = Keys(partial(_read_every, usual=None), _write_window)  # Mixtral
EVERY_IF_USED = Keys(_if_used(partial(_read_every, usual=DEFAULT)), _write_used)  # Qwen 3 MoE
BY_LAYER = Keys(_if_used(partial(_read_layers, windowed=_last_layers)), _write_layers)  # Qwen
ALTERNATING = Keys(  # Qwen 2 MoE
    _if_used(partial(_read_layers, windowed=_every_second)),
    lambda model: _write_used(model) | _write_types(model),
)
BY_PATTERN = Keys(
    _read_pattern, lambda model: _write_window(model) | _write_types(model)
)  # Gemma 3
EVERY_SECOND = Keys(  # Gemma 2
    partial(_read_layers, windowed=lambda layers, full: [i % 2 == 0 for i in range(layers)]),
    lambda model: _write_window(model) | _write_types(model),
)
THREE_OF_FOUR = Keys(  # OLMo 3
    partial(_read_layers, windowed=lambda layers, full: [bool((i + 1) % 4) for i in range(layers)]),
    lambda model: _write_window(model) | _write_types(model),
)
BY_TYPE = Keys(  # dots1
    partial(_read_layers, windowed=_last_layers, full_layers=62),
    lambda model: _write_window(model) | _write_types(model),
)
