"""A case: values of fields, and the config that they make."""

import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxptd.config import Config, from_dict, nested
from jaxptd.config.effects import without_effect
from jaxptd.errors import UserError
from jaxptd.models.families import family_of
from jaxptd.models.stages import make_plan
from jaxptd.proof.compare import table_file
from jaxptd.proof.values import DRAWN, FIXED, OWN, UNEVEN, Values

_FIELD = re.compile(r"\b(?:model|layout|data|optimizer|train)(?:\.[a-z0-9_]+)+")
_NUMBER = re.compile(r"(?<![A-Za-z_])\d+(?:\.\d+)?(?:e-?\d+)?")
_PARTS: Mapping[str, int] = {"interleaved": 2, "zb-v": 2, "own-v.csv": 2}  # of each stage


def made(values: Values, folder: Path) -> Config:
    """The config of a case, which its layout can train.

    Args:
        values: of every field that is drawn; tables of schedules are written here.
        folder: for these.

    Raises:
        UserError: the config is refused.
    """
    fields = {**FIXED, **values}
    if fields["layout.schedule"] in OWN and fields["layout.pp"] > 1:
        fields["layout.schedule"] = str(
            table_file(
                folder,
                fields["layout.schedule"],
                stages=fields["layout.pp"],
                micro_batches=fields["train.micro_batches"],
            )
        )
    if fields["layout.stage_layers"] == UNEVEN:
        fields["layout.stage_layers"] = uneven(values)
    config = from_dict(nested(fields))
    family_of(config.model).check(config)
    if config.layout.pp > 1:
        make_plan(config)
    return config


def uneven(values: Values) -> tuple[int, ...]:
    """Layers of each part of the model, as many as they happen to be."""
    layers, decoders = values["model.num_layers"], 0
    if values["model.family"] == "t5":
        decoders = values["model.encoder_decoder.num_layers"] or layers
    chunks = values["layout.virtual_stages"] or _PARTS.get(values["layout.schedule"], 1)
    parts, layers = values["layout.pp"] * chunks, layers + decoders
    draw = random.Random(f"{parts} {layers}")
    cuts = sorted(draw.sample(range(1, layers), parts - 1)) if parts <= layers else []
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))


def named(sentence: str) -> list[str]:
    """The drawn fields that a sentence names, each once."""
    fields = dict.fromkeys(_FIELD.findall(sentence))
    return [name for name in fields if name in DRAWN]


def without_effect_of(config: Config) -> Iterator[str]:
    """Yields a sentence for each field that was drawn without an effect."""
    for sentence in without_effect(config.model, config.layout):
        if named(sentence):
            yield sentence


def general(sentence: str) -> str:
    """A sentence without its numbers and lists, to count those that say the same."""
    short = re.sub(r"\S+/", "", re.sub(r"\([\d, ]+\)", "(...)", sentence))
    return _NUMBER.sub("N", short)


def try_made(values: Values, folder: Path) -> Config | str:
    """The config of a case, or the sentence that refuses it."""
    try:
        return made(values, folder)
    except UserError as error:
        return str(error)
