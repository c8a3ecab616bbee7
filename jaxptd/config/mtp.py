"""The section `model.mtp` of a config: predictions of several tokens ahead.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

import dataclasses
from typing import Any

from jaxptd.config.checks import Section, require_not_negative, require_positive
from jaxptd.errors import UserError
from jaxptd.fields import check_fields, named_fields

NAME = "model.mtp"
WEIGHT = 0.3


@named_fields
@dataclasses.dataclass(frozen=True)
class MTP(Section):
    """Multi-token prediction: modules behind the last layer that predict tokens further ahead.

    Each is a layer like the last one, with norms and a matmul before it. They share the embedding
    and the output layer.

    Args:
        layers: number of modules, one behind the other, each predicting one token further; 0 has
            none.
        weight: factor on the mean of their losses.
    """

    layers: int = 0
    weight: float = WEIGHT

    def __post_init__(self) -> None:
        check_fields(self, NAME)
        require_not_negative(NAME, self, "layers")
        require_positive(NAME, self, "weight")
        if not self.layers and self.weight != WEIGHT:
            raise UserError(
                f"{NAME}.weight={self.weight} has no effect without {NAME}.layers; set it to 1 or "
                f"more, or leave {NAME}.weight out"
            )

    @property
    def is_there(self) -> bool:
        return self.layers > 0


def check_mtp(model: Any) -> None:
    """Raises UserError for options that MTP modules of a `ModelConfig` do not support."""
    if model.mtp.layers >= model.seq_length:
        raise UserError(
            f"{NAME}.layers={model.mtp.layers}: no token of model.seq_length={model.seq_length} "
            f"has a token so far ahead; use {NAME}.layers={model.seq_length - 1} or fewer"
        )
    if model.block.norm_order == "post":
        raise UserError(
            f"{NAME} with model.norm_order=post: its modules take what a norm after all layers "
            "returns; use model.norm_order=pre, output or both"
        )
    if model.moe and model.moe.upcycle:
        raise UserError(
            f"{NAME} with model.moe.upcycle=true: a dense model has no weights for its modules; "
            "leave one of them out"
        )
