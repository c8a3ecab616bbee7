"""The section `model.lora` of a config: low-rank adapters beside frozen matrices.

Source: Hu et al., LoRA, arXiv 2106.09685; Kalajdzievski, rsLoRA, arXiv 2312.03732.
"""

import dataclasses
import fnmatch
from collections.abc import Collection
from typing import Any

from jaxptd.config.checks import Section, require_not_negative, require_positive
from jaxptd.errors import UserError, quoted
from jaxptd.fields import check_fields, named_fields

NAME = "model.lora"
INSIDE = ".lora."  # in the names of adapters' parameters, and in no others


@named_fields
@dataclasses.dataclass(frozen=True)
class LoRA(Section):
    """Low-rank adapters (LoRA): a layer's matrix W stays as it is, and x W + scale (x A) B trains.

    A begins at random and B with zeros, so that the model begins as it was without adapters. All
    other parameters are frozen, unless optimizer.frozen names those that are.

    Args:
        rank: columns of A and rows of B; 0 has no adapters.
        alpha: scale * rank; null is 2 * rank.
        targets: names of the matrices that have adapters, such as attention.q or mlp.*, with * for
            any letters; null is all that can have them.
        rslora: divides alpha by the root of rank instead of rank (rsLoRA).
    """

    rank: int = 0
    alpha: float | None = None
    targets: tuple[str, ...] | None = None
    rslora: bool = False

    def __post_init__(self) -> None:
        check_fields(self, NAME)
        require_not_negative(NAME, self, "rank")
        require_positive(NAME, self, "alpha")
        if self.targets is not None and not self.targets:
            raise UserError(f"{NAME}.targets is empty; leave it out for all matrices")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not self.rank and value != field.default:
                raise UserError(
                    f"{NAME}.{field.name}={quoted(value)} has no effect without {NAME}.rank; set "
                    "it to 1 or more"
                )

    @property
    def is_there(self) -> bool:
        return self.rank > 0

    @property
    def used_alpha(self) -> float:
        """Alpha, or its default."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """The factor of what adapters add."""
        return self.used_alpha / (self.rank**0.5 if self.rslora else self.rank)

    def adapts(self, name: str) -> bool:
        """True if the matrix of that name in a layer, such as mlp.up, has an adapter."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.targets or ("*",))


def check_targets(lora: LoRA | None, names: Collection[str]) -> None:
    """Raises UserError if a target names no matrix that has an adapter.

    names: of all parameters of the model.
    """
    there = {name.partition(INSIDE)[0].partition(".")[2] for name in names if INSIDE in name}
    for pattern in (lora and lora.targets) or ():
        if not fnmatch.filter(there, pattern):
            raise UserError(
                f"{NAME}.targets={quoted(pattern)} names no matrix that can have an adapter; use "
                "names such as attention.out or mlp.*, or leave it out for all that can"
            )


def check_lora(model: Any) -> None:
    """Raises UserError for options of a `ModelConfig` that adapters do not support."""
    if model.products != "native":
        raise UserError(
            f"{NAME} with model.products={model.products}: adapters multiply in model.dtype; use "
            "model.products=native"
        )
    if model.moe and model.moe.upcycle:
        raise UserError(
            f"{NAME} with model.moe.upcycle=true: routers would stay as they are drawn; leave one "
            "of them out"
        )
