"""Fields of a config that a plan may be asked to leave as they are."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.config.effects import without_effect
from jaxptd.errors import UserError, did_you_mean, quoted
from jaxptd.fields.values import ImpossibleError, OtherTypeError, convert, describe
from jaxptd.layout import SQUARE, Layout

Pins = Mapping[str, Any]  # of fields, such as "layout.tp", the only value that is tried
SECTIONS: Mapping[str, Any] = {"layout": Layout, "model": ModelConfig, "train": TrainConfig}
PINNED = (
    *("layout.tp", "layout.row", "layout.col", "layout.cp", "layout.pp", "layout.dp"),
    *("layout.sequence_parallel", "layout.collective_matmul", "layout.keep_gathered"),
    *("layout.attention2d", "layout.matmul2d", "layout.matmul2d_slices", "layout.ring"),
    *("layout.schedule", "layout.virtual_stages", "layout.stage_layers", "layout.zero"),
    *("layout.offload", "model.remat", "model.remat_layers", "train.micro_batches"),
)


# Those that one layer depends on.
OF_A_LAYER = (
    *("sequence_parallel", "collective_matmul", "keep_gathered"),
    *("attention2d", "matmul2d", "matmul2d_slices", "ring"),
)


def hold(pins: Pins, model: ModelConfig, layout: Layout) -> bool:
    """True if a layer's layout has the values that are pinned, and each has an effect."""
    pinned = [name for name in OF_A_LAYER if f"layout.{name}" in pins]
    if not pinned:
        return True
    kept = dataclasses.replace(model, remat="none", remat_layers=None)
    vain = {sentence.partition("=")[0] for sentence in without_effect(kept, layout)}
    return all(
        getattr(layout, name) == pins[f"layout.{name}"] and f"layout.{name}" not in vain
        for name in pinned
    )


def checked_pins(pins: Pins, config: Config) -> dict[str, Any]:
    """Pins with values of their fields' types.

    Raises:
        UserError: a field cannot be pinned, or has no such value, or pins contradict each other.
    """
    found = {}
    for name, value in pins.items():
        if name not in PINNED:
            remedy = did_you_mean(name, PINNED, otherwise=f"use one of {', '.join(PINNED)}")
            raise UserError(f"{quoted(name)} is nothing that is planned; {remedy}")
        section, _, field = name.partition(".")
        kind = next(f.type for f in dataclasses.fields(SECTIONS[section]) if f.name == field)
        try:
            found[name] = convert(value, kind)
        except (OtherTypeError, ImpossibleError) as error:
            words = f"expected {describe(kind)}, got {quoted(str(value))}"
            raise UserError(f"{name}: {words}") from error
        if name == "layout.offload" and isinstance(found[name], tuple):
            raise UserError(f"{name}: a plan offloads one thing; name one, or none")
        if name == "layout.offload" and found[name] == "parameters":
            raise UserError(f"{name}=parameters is not planned; use none, optimizer or activations")
    _check_together(found, config)
    return found


def _check_together(pins: Pins, config: Config) -> None:
    """Raises UserError for pins that no layout has, with what the search would add to them."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, value in pins.items():
        section, _, field = name.partition(".")
        sections[section][field] = value
    layout = sections["layout"]
    if layout.get("collective_matmul"):
        layout.setdefault("sequence_parallel", True)
    if layout.get("matmul2d") in SQUARE:
        side = layout.get("row", layout.get("col", 1))
        layout |= {"row": side, "col": side} | layout
    Layout(**layout)
    dataclasses.replace(config.model, **sections["model"])
    dataclasses.replace(config.train, **sections["train"])
