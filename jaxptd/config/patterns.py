"""Options of some layers only: a period that repeats, or an entry for each layer."""

from typing import Any

from jaxptd.errors import UserError, quoted


def by_layer(pattern: tuple[bool, ...] | None, layers: int) -> tuple[bool, ...]:
    """The entry of each layer of a pattern that repeats; without one, true for all.

    >>> by_layer((True, True, False), 4)
    (True, True, False, True)
    """
    period = pattern or (True,)
    return tuple(period[layer % len(period)] for layer in range(layers))


def period_of(each: tuple[bool, ...]) -> tuple[bool, ...] | None:
    """The shortest pattern that gives these entries of layers; None if all are true.

    >>> period_of((True, False, True, False, True))
    (True, False)
    """
    if all(each):
        return None
    sizes = range(1, len(each) + 1)
    return next(each[:size] for size in sizes if by_layer(each[:size], len(each)) == each)


def check_patterns(model: Any) -> None:
    """Raises UserError for a pattern of layers that does not fit, or has no effect."""
    rotated = model.rope.layers if model.rope else None
    for name, pattern, without in (
        ("model.window_layers", model.window_layers, "window=null"),
        ("model.softcap_layers", model.softcap_layers, "attention_softcap=null"),
        ("model.rope.layers", rotated, "positions=none"),
    ):
        if pattern is None:
            continue
        words = f"{name}={quoted(list(pattern))}"
        if not pattern:
            raise UserError(f"{words} has no entry; leave it out, or give a period")
        if len(pattern) > model.num_layers:
            raise UserError(
                f"{words} has {len(pattern)} entries, but model.num_layers={model.num_layers}; "
                "use a period, which repeats, or one entry for each layer"
            )
        if not any(by_layer(pattern, model.num_layers)):
            raise UserError(f"{words}: no layer has it; use model.{without}")
    for name, needed in (("window_layers", "window"), ("softcap_layers", "attention_softcap")):
        if getattr(model, needed) is None and getattr(model, name):
            raise UserError(
                f"model.{name} has no effect without model.{needed}; set it, or leave "
                f"model.{name} out"
            )
    if model.encoder_decoder and model.rope and model.rope.layers:
        raise UserError(
            "model.rope.layers is of decoders; an encoder-decoder rotates in all layers: leave it "
            "out"
        )
    if model.rope and model.rope.window_theta is not None and model.window is None:
        raise UserError(
            "model.rope.window_theta has no effect without model.window; set it, or leave "
            "model.rope.window_theta out"
        )
