"""The section `model.moe` of a config: experts, and the router that chooses among them.

Formulas of 30 published routers are special cases of these fields: Mixtral and Qwen choose by the
softmax of all scores, DeepSeek-V3 and its descendants by sigmoids plus a bias, in groups.

Letters: E experts, K of them for a token.
Source: Shazeer et al., arXiv 1701.06538; Fedus et al., arXiv 2101.03961; DeepSeek-V3, arXiv
2412.19437.
"""

import dataclasses
from typing import Any, Literal

from jaxptd.config.checks import (
    Section,
    require_divides,
    require_not_negative,
    require_positive,
)
from jaxptd.errors import UserError
from jaxptd.fields import check_fields, named_fields
from jaxptd.layout import Layout

NAME = "model.moe"

RouterScore = Literal["softmax", "sigmoid"]
GroupScore = Literal["best_two", "best"]


@named_fields
@dataclasses.dataclass(frozen=True)
class MoE(Section):
    """Mixture of experts: every token passes the MLPs of the few experts that a router chooses.

    No token is dropped.

    Args:
        num_experts: experts in a layer.
        top_k: experts that each token passes.
        ffn_hidden_size: width inside an expert; null is model.ffn_hidden_size.
        shared_ffn_hidden_size: width inside an MLP that every token passes besides; 0 has none.
        shared_gate: scales that MLP's output by a sigmoid of its own.
        score: how router logits become scores: softmax over all experts, or a sigmoid of each.
        normalize: divides the scores of a token's experts by their sum, to weigh their outputs.
        scale: factor on these weights.
        num_groups: groups of neighbouring experts; a token chooses within the best top_groups.
        top_groups: groups that a token may choose from.
        group_score: score of a group: the sum of its best_two, or its best.
        router_bias: adds a trained bias to router logits.
        bias_rate: each step moves the bias that chooses experts, but does not weigh them, by this
            much towards equal loads, by sign; 0 keeps it.
        balance_loss: weight of the loss that is smallest where the experts of each sequence have
            equal loads; 1 if they have.
        z_loss: weight of the mean square of log sum exp(router logits).
        first_dense: how many first layers have an MLP instead of experts.
        every: only each n-th layer has experts.
        dense_layers: numbers of further layers with an MLP.
        replay: takes the experts of a token from the batch's field `choices`, where it names them,
            instead of choosing; for batches made in Python.
        chunk: experts work on chunks of this many times the rows of balanced experts, as many as
            the router fills; less takes less memory.
        upcycle: the weights of checkpoint.start are a dense model's: each expert begins as a copy
            of its MLP, and the router at random.
    """

    num_experts: int = 8
    top_k: int = 2
    ffn_hidden_size: int | None = None
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    score: RouterScore = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "best_two"
    router_bias: bool = False
    bias_rate: float = 0.0
    balance_loss: float = 0.0
    z_loss: float = 0.0
    first_dense: int = 0
    every: int = 1
    dense_layers: tuple[int, ...] = ()
    replay: bool = False
    chunk: float = 1.25
    upcycle: bool = False

    def __post_init__(self) -> None:
        check_fields(self, NAME)
        require_positive(NAME, self, "num_experts", "top_k", "ffn_hidden_size", "scale")
        require_positive(NAME, self, "num_groups", "top_groups", "every", "chunk")
        require_not_negative(NAME, self, "shared_ffn_hidden_size", "bias_rate", "balance_loss")
        require_not_negative(NAME, self, "z_loss", "first_dense")
        require_divides(
            f"{NAME}.num_experts", self.num_experts, f"{NAME}.num_groups", self.num_groups
        )
        if self.top_groups > self.num_groups:
            raise UserError(
                f"{NAME}.top_groups={self.top_groups} is more than {NAME}.num_groups="
                f"{self.num_groups}; use {self.num_groups} or fewer"
            )
        most = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > most:
            raise UserError(
                f"{NAME}.top_k={self.top_k}: a token can choose from {most} "
                f"expert{'s' if most > 1 else ''}; use {most} or fewer"
            )
        if self.shared_gate and not self.shared_ffn_hidden_size:
            raise UserError(
                f"{NAME}.shared_gate=true has no effect with {NAME}.shared_ffn_hidden_size=0; "
                f"use {NAME}.shared_gate=false, or give the shared MLP a size"
            )
        if self.upcycle and self.shared_ffn_hidden_size:
            raise UserError(
                f"{NAME}.upcycle=true with {NAME}.shared_ffn_hidden_size="
                f"{self.shared_ffn_hidden_size}: a dense model has no weights for a shared MLP; "
                f"use {NAME}.shared_ffn_hidden_size=0"
            )

    @property
    def has_losses(self) -> bool:
        """True if the router adds terms to the loss."""
        return self.balance_loss > 0 or self.z_loss > 0

    def is_sparse(self, layer: int) -> bool:
        """True if a layer has experts."""
        others = layer < self.first_dense or layer in self.dense_layers
        return not others and (layer + 1) % self.every == 0


# What the families of DeepSeek have where a config says nothing.
_OF_V2: Any = {"num_groups": 8, "top_groups": 3, "group_score": "best", "first_dense": 1}
DEEPSEEK_V2 = MoE(160, 6, 1536, 2 * 1536, normalize=False, scale=16.0, **_OF_V2)
_OF_V3: Any = {"num_groups": 8, "top_groups": 4, "score": "sigmoid", "first_dense": 3}
DEEPSEEK_V3 = MoE(256, 8, 2048, 2048, scale=2.5, **_OF_V3)


def check_layers(moe: MoE, layers: int) -> None:
    """Raises UserError if no layer has experts, or a dense one does not exist."""
    if beyond := [layer for layer in moe.dense_layers if not 0 <= layer < layers]:
        raise UserError(
            f"{NAME}.dense_layers={list(moe.dense_layers)}: there is no layer {beyond[0]}; with "
            f"model.num_layers={layers} use 0 to {layers - 1}"
        )
    if not any(map(moe.is_sparse, range(layers))):
        raise UserError(
            f"{NAME}: none of model.num_layers={layers} layers has experts; use more layers, or "
            f"smaller {NAME}.first_dense, {NAME}.every or {NAME}.dense_layers"
        )


def check_experts(model: Any, layout: Layout) -> None:
    """Raises UserError if a model's experts cannot run with the layout, or with other options."""
    if layout.has_grid:
        raise UserError(
            f"{NAME} with a grid (layout.row, layout.col): a grid splits every matrix over rows "
            "and columns, and experts are split over layout.ep; use layout.tp instead"
        )
    devices, over = layout.expert_devices, " x ".join(f"layout.{a}" for a in layout.expert_axes)
    require_divides(f"{NAME}.num_experts", model.moe.num_experts, over, devices)
