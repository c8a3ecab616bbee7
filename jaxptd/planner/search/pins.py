"""Fields of a config that a plan may be asked to leave as they are."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from jaxptd.config import ModelConfig, TrainConfig
from jaxptd.errors import UserError, quoted
from jaxptd.fields.values import ImpossibleError, OtherTypeError, convert, describe
from jaxptd.layout import Layout

Pins = Mapping[str, Any]  # of fields, such as "layout.tp", the only value that is tried
SECTIONS: Mapping[str, Any] = {"layout": Layout, "model": ModelConfig, "train": TrainConfig}
PINNED = (
    *("layout.tp", "layout.row", "layout.col", "layout.cp", "layout.pp", "layout.dp"),
    *("layout.sequence_parallel", "layout.collective_matmul", "layout.keep_gathered"),
    *("layout.attention2d", "layout.matmul2d", "layout.matmul2d_slices", "layout.ring"),
    *("layout.schedule", "layout.virtual_stages", "layout.stage_layers", "layout.zero"),
    *("layout.offload", "model.remat", "model.remat_layers", "train.micro_batches"),
)


def checked_pins(pins: Pins) -> dict[str, Any]:
    """Pins with values of their fields' types.

    Raises:
        UserError: a field cannot be pinned, or has no such value.
    """
    found = {}
    for name, value in pins.items():
        if name not in PINNED:
            near = difflib.get_close_matches(name, PINNED, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"use one of {', '.join(PINNED)}"
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
    return found
