"""The models of the paper's table 4 and figure 10, and which of them this version has."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxptd.commands.command_line import load_config
from jaxptd.config.files import packaged_configs
from jaxptd.errors import UserError
from jaxptd.mesh import Layout, make_mesh
from jaxptd.models.families import FAMILIES
from jaxptd.step import Program


@dataclasses.dataclass(frozen=True)
class PaperModel:
    """A model of the paper.

    Args:
        name: in the paper.
        family: `model.family`.
        config: the packaged config with 2.5 B parameters.
        small: fields of `ModelConfig` that its small model of figure 10 has besides.
    """

    name: str
    family: str
    config: str
    small: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def missing(self) -> str:
        """Names what this version lacks to compile it and to train a small one; empty: nothing."""
        if self.family not in FAMILIES:
            return f"model.family={self.family}"
        return "" if self.config in packaged_configs() else f"configs/{self.config}.yaml"


MODELS = (
    PaperModel("GPT", "gpt", "gpt2-2.5b"),
    PaperModel("BERT", "bert", "bert-2.5b"),
    PaperModel("T5", "t5", "t5-2.5b", {"decoder_seq_length": 32}),
)


def chosen(names: Sequence[str]) -> list[PaperModel]:
    """The models of these names; all that there are if none is named.

    Raises:
        UserError: this version lacks one that is named.
    """
    found = [model for model in MODELS if model.name in names]
    if lacking := [model for model in found if model.missing]:
        there = ", ".join(model.name for model in MODELS if not model.missing)
        first = lacking[0]
        raise UserError(f"--models {first.name}: there is no {first.missing} yet; use {there}")
    return found or [model for model in MODELS if not model.missing]


@functools.cache
def parameters(config: str) -> int:
    """Numbers in the parameters of a packaged config's model, on one device."""
    alone = dataclasses.replace(load_config(config), layout=Layout())
    infos = Program(alone, make_mesh(Layout())).infos
    return sum(math.prod(info.shape) for info in infos.values())


def omitted(models: Sequence[PaperModel]) -> str:
    """A sentence on each model of the paper that is not among these; else empty."""
    others = [model for model in MODELS if model not in models]
    return " ".join(f"{each.name} is left out: {_reason(each)}." for each in others)


def _reason(model: PaperModel) -> str:
    asked = f"it was not asked for (`--models {model.name}`)"
    return f"there is no {model.missing} yet" if model.missing else asked
