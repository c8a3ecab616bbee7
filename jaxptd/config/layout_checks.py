"""Checks that a layout supports a model's options."""

from jaxptd.config.model import ModelConfig
from jaxptd.errors import UserError
from jaxptd.layout import Layout


def check_layout(model: ModelConfig, layout: Layout) -> None:
    """Raises UserError if the model cannot run with the layout."""
    if layout.unfused_attention and model.attention == "cudnn":
        raise UserError(
            f"{layout.unfused_attention} has no fused attention kernel; use model.attention=xla"
        )
    _check_offload(model, layout)


def _check_offload(model: ModelConfig, layout: Layout) -> None:
    nothing_kept = model.remat != "dots" or model.remat_layers == 0
    if layout.offload == "activations" and (nothing_kept or layout.pp > 1):
        layers = "" if model.remat_layers is None else f", model.remat_layers={model.remat_layers}"
        raise UserError(
            f"layout.offload=activations with model.remat={model.remat}{layers}, "
            f"layout.pp={layout.pp}: it offloads what model.remat=dots keeps, without a pipeline; "
            "use model.remat=dots and layout.pp=1"
        )
