"""The kernel and the scores that a config names."""

from typing import Any

from jaxptd.attention.cudnn import Cudnn, unproven
from jaxptd.attention.kernel import Dropout, Kernel, Scores
from jaxptd.attention.obstacle import obstacle
from jaxptd.attention.xla import Xla
from jaxptd.config import AttentionKind, Config, ModelConfig
from jaxptd.errors import UserError
from jaxptd.layers.dropout import keep_mask


def make_kernel(config: ModelConfig) -> Kernel:
    """The attention kernel that the config names."""
    return Cudnn() if config.attention == "cudnn" else Xla(Dropout(config.dropout, keep_mask))


def make_scores(config: ModelConfig) -> Scores:
    """The scores that the config names; a window as long as the sequence is none."""
    window = config.block.window if config.reach < config.seq_length else None
    return Scores(config.block.attention_scale, config.block.causal, window)


def choose_kernel(
    config: Config, device: Any, *, documents: bool
) -> tuple[AttentionKind, str | None]:
    """The kernel that `model.attention` selects on a device, and why cuDNN cannot be used, if so.

    Args:
        config: of the run.
        device: that it runs on.
        documents: whether documents, or padding, are kept apart.

    Raises:
        UserError: `cudnn` is requested where it cannot run.
    """
    model, layout = config.model, config.layout
    reason = obstacle(
        device.platform,
        model.dtype,
        head_size=model.block.head_size,
        dropout=model.dropout,
        documents=documents,
        bias=model.block.relative is not None,
        window_in_ring=model.reach < model.seq_length and layout.ring_size > 1,
        capability=float(getattr(device, "compute_capability", 9.0)),
    )
    reason = reason or unproven()
    if layout.unfused_attention:
        reason = f"{layout.unfused_attention} has no fused attention kernel"
    if model.attention == "cudnn" and reason:
        raise UserError(f"model.attention=cudnn: {reason}; use model.attention=xla")
    return ("xla", reason) if model.attention == "xla" or reason else ("cudnn", None)
