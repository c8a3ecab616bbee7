"""Checks that a layout supports a model's options."""

from jaxptd.config.model import ModelConfig
from jaxptd.errors import UserError
from jaxptd.layout import Layout


def check_layout(model: ModelConfig, layout: Layout) -> None:
    """Raises UserError if the model cannot run with the layout."""
    _check_products(model, layout)
    if layout.unfused_attention and model.attention == "cudnn":
        raise UserError(
            f"{layout.unfused_attention} has no fused attention kernel; use model.attention=xla"
        )
    _check_offload(model, layout)


def _check_products(model: ModelConfig, layout: Layout) -> None:
    if model.products == "fp8" and layout.has_grid:
        raise UserError(
            f"model.products=fp8 with layout.row={layout.row}, layout.col={layout.col}: products "
            "on a grid are native; use layout.tp, or model.products=native"
        )
    if model.products == "fp8" and layout.collective_matmul:
        raise UserError(
            "model.products=fp8 with layout.collective_matmul=true: products in ring steps are "
            "native; use layout.collective_matmul=false, or model.products=native"
        )


def _check_offload(model: ModelConfig, layout: Layout) -> None:
    nothing_kept = model.remat != "dots" or model.remat_layers == 0
    if layout.offload == "activations" and (nothing_kept or layout.pp > 1):
        layers = "" if model.remat_layers is None else f", model.remat_layers={model.remat_layers}"
        raise UserError(
            f"layout.offload=activations with model.remat={model.remat}{layers}, "
            f"layout.pp={layout.pp}: it offloads what model.remat=dots keeps, without a pipeline; "
            "use model.remat=dots and layout.pp=1"
        )
