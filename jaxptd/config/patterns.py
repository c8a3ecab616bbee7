"""Options of some layers only: a period that repeats, or an entry for each layer."""

from typing import Any, TypeVar

from jaxptd.errors import UserError, quoted

Entry = TypeVar("Entry")


def by_layer(pattern: tuple[bool, ...] | None, layers: int) -> tuple[bool, ...]:
    """The entry of each layer of a pattern that repeats; without one, true for all.

    >>> by_layer((True, True, False), 4)
    (True, True, False, True)
    """
    return repeated(pattern or (True,), layers)


def repeated(period: tuple[Entry, ...], layers: int) -> tuple[Entry, ...]:
    """The entry of each layer of a period."""
    return tuple(period[layer % len(period)] for layer in range(layers))


def period_of(each: tuple[bool, ...]) -> tuple[bool, ...] | None:
    """The shortest pattern that gives these entries of layers; None if all are true.

    >>> period_of((True, False, True, False, True))
    (True, False)
    """
    return None if all(each) else shortest(each)


def shortest(each: tuple[Entry, ...], *, whole: bool = False) -> tuple[Entry, ...]:
    """The shortest period that gives these entries of layers; whole: whose length divides theirs.

    >>> shortest((2, 6, 2)), shortest((2, 6, 2), whole=True)
    ((2, 6), (2, 6, 2))
    """
    sizes = (size for size in range(1, len(each) + 1) if not whole or len(each) % size == 0)
    return next(each[:size] for size in sizes if repeated(each[:size], len(each)) == each)


def check_patterns(model: Any) -> None:
    """Raises UserError for a pattern of layers that does not fit, or has no effect."""
    rotated = model.rope.layers if model.rope else None
    for name, pattern, without in (
        ("model.head_sizes", model.head_sizes, "head_size=null"),
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
    if model.head_sizes:
        _check_head_sizes(model)
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


def _check_head_sizes(model: Any) -> None:
    """Raises UserError for widths of heads by layer that do not fit, or that the model lacks."""
    words = f"model.head_sizes={quoted(list(model.head_sizes))}"
    for size in model.head_sizes:
        if size < 1 or (model.rope and size % 2):
            raise UserError(f"{words}: use positive numbers, which positions=rope needs even")
    if len(set(model.head_sizes)) == 1:
        raise UserError(f"{words}: all are alike; use model.head_size={model.head_sizes[0]}")
    if model.head_size is not None:
        raise UserError(f"{words} with model.head_size={model.head_size}; leave one of them out")
    for name in ("moe", "latent", "encoder_decoder", "images"):
        if getattr(model, name):
            raise UserError(
                f"{words} with model.{name}: only layers with plain attention and dense MLPs, of "
                "one stack, may differ in the width of their heads; leave model.head_sizes out"
            )
    if (model.remat_layers or 0) % model.period:
        raise UserError(
            f"model.remat_layers={model.remat_layers} is not a multiple of the {model.period} "
            "layers of a period of model.head_sizes, which recompute together; use a multiple"
        )
