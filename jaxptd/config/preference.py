"""The section `model.preference` of a config: training on pairs of a better and a worse answer.

Source: Rafailov et al., Direct Preference Optimization, arXiv 2305.18290; Azar et al., A General
Theoretical Paradigm to Understand Learning from Human Preferences (IPO), arXiv 2310.12036.
"""

import dataclasses
from typing import Any, Literal

from jaxptd.config.checks import Section, require_positive
from jaxptd.errors import UserError
from jaxptd.fields import check_fields, named_fields

NAME = "model.preference"
BETA = 0.1
LOSS = "preference_loss"  # names of sums over pairs
ACCURACY, CHOSEN, REJECTED = "accuracy", "chosen_reward", "rejected_reward"
SHORTEST = 3  # places that a pair takes at least: two texts of two tokens, see `data.packing`

PreferenceLoss = Literal["none", "sigmoid", "ipo"]


@named_fields
@dataclasses.dataclass(frozen=True)
class Preference(Section):
    """Preference optimization (DPO): of two answers, the chosen one should gain on the rejected.

    It replaces next-token prediction. What an answer gains is its log-probability, less that of the
    model that the run begins with, its reference.

    Args:
        loss: none (predict the next token), sigmoid (DPO: -log sigmoid(beta * margin), the margin
            being the chosen answer's gain less the rejected one's), or ipo (the square of margin
            - 1 / (2 beta), of gains per token).
        beta: how closely the model stays to its reference.
    """

    loss: PreferenceLoss = "none"
    beta: float = BETA

    def __post_init__(self) -> None:
        check_fields(self, NAME)
        require_positive(NAME, self, "beta")
        if self.loss == "none" and self.beta != BETA:
            raise UserError(
                f"{NAME}.beta={self.beta} has no effect without {NAME}.loss; set it to sigmoid or "
                f"ipo, or leave {NAME}.beta out"
            )

    @property
    def is_there(self) -> bool:
        return self.loss != "none"


def most_pairs(seq_length: int) -> int:
    """The most pairs that a sequence can hold."""
    return max(1, seq_length // SHORTEST)


def check_preference(model: Any) -> None:
    """Raises UserError for options of a `ModelConfig` that have another loss than the pairs'."""
    if model.mtp:
        raise UserError(
            f"{NAME}.loss={model.preference.loss} with model.mtp.layers={model.mtp.layers}, whose "
            "modules predict tokens; use model.mtp.layers=0"
        )
    if model.z_loss:
        raise UserError(
            f"{NAME}.loss={model.preference.loss} with model.z_loss={model.z_loss}, which is part "
            "of next-token prediction; leave one of them out"
        )
