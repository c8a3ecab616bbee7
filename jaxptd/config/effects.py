"""Fields of a model and of a layout that do not fit each other, or that have no effect.

Fields without effect are refused if they need a pipeline or a grid. Others may stay in a config
that is tried on fewer devices, and are named when a run starts.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from jaxptd.config.model import ModelConfig
from jaxptd.config.moe import check_experts
from jaxptd.errors import UserError, quoted
from jaxptd.layout import Layout


@dataclasses.dataclass(frozen=True)
class _Need:
    """The condition under which fields have an effect.

    Args:
        fields: `section.name` of each.
        met: tells whether they have an effect.
        words: the condition.
        refused: fields without effect are an error.
    """

    fields: tuple[str, ...]
    met: Callable[[ModelConfig, Layout], bool]
    words: str
    refused: bool = False


_NEEDS = (
    _Need(
        ("layout.schedule", "layout.virtual_stages", "layout.stage_layers"),
        lambda model, layout: layout.pp > 1,
        "a pipeline, layout.pp=2 or more",
        refused=True,
    ),
    _Need(
        ("layout.matmul2d", "layout.matmul2d_slices"),
        lambda model, layout: layout.has_grid,
        "a grid, layout.row or layout.col of 2 or more",
        refused=True,
    ),
    _Need(
        ("layout.attention2d",),
        lambda model, layout: layout.has_grid,
        "a grid, layout.row or layout.col of 2 or more",
    ),
    _Need(
        ("layout.ring",),
        lambda model, layout: layout.ring_size > 1,
        "a ring, layout.cp or layout.row of 2 or more",
    ),
    _Need(
        ("layout.latent_exchange",),
        lambda model, layout: model.latent is not None and layout.expands_latents,
        "latent attention with layout.latent_products=expanded, and layout.cp or layout.ulysses of "
        "2 or more with another layout.ring than rsa",
    ),
    _Need(
        ("layout.latent_products",),
        lambda model, layout: model.latent is not None,
        "latent attention",
    ),
    _Need(
        ("layout.sequence_parallel", "layout.collective_matmul"),
        lambda model, layout: layout.tp > 1 or _hops_over_ep(model, layout),
        "layout.tp=2 or more",
    ),
    _Need(
        ("layout.experts",),
        lambda model, layout: model.moe is not None and layout.tp > 1,
        "a mixture of experts, and layout.tp=2 or more",
    ),
    _Need(
        ("layout.keep_gathered",),
        lambda model, layout: layout.gathers_inputs and layout.tp > 1 and model.keeps_inputs,
        "layout.sequence_parallel without layout.collective_matmul, layout.tp=2 or more, and "
        "layers with model.remat=none or attention",
    ),
    _Need(
        ("layout.zero",),
        lambda model, layout: layout.zero_shards > 1 or layout.splits_state,
        "layout.dp, layout.ep, layout.cp or layout.ulysses of 2 or more",
    ),
    _Need(
        ("layout.replicas",),
        lambda model, layout: layout.splits_state or (layout.zero > 0 and layout.zero_shards > 1),
        "layout.zero and layout.dp, layout.ep, layout.cp or layout.ulysses of 2 or more; without "
        "them it is the same as layout.dp",
    ),
    _Need(
        ("layout.replica_state",),
        lambda model, layout: layout.splits_state,
        "layout.zero, and layout.replicas of 2 or more",
    ),
    _Need(
        ("layout.update_on",),
        lambda model, layout: layout.hosts_moments,
        "layout.offload=optimizer",
        refused=True,
    ),
    _Need(
        ("model.window",),
        lambda model, layout: model.reach < model.seq_length,
        "a longer model.seq_length",
    ),
    _Need(
        ("model.remat_layers",),
        lambda model, layout: model.remat != "none",
        "model.remat",
    ),
)


def _hops_over_ep(model: ModelConfig, layout: Layout) -> bool:
    """True if collective matmul lets tokens hop from expert to expert, with tp or without."""
    return model.moe is not None and layout.ep > 1 and layout.collective_matmul


def refuse_without_effect(model: ModelConfig, layout: Layout) -> None:
    """Raises UserError for a field of a pipeline or of a grid where there is none."""
    for need, field, value in _without_effect(model, layout):
        if need.refused:
            raise UserError(
                f"{field}={quoted(value)} has no effect without {need.words}; set that as well, or "
                f"leave {field} out"
            )


def without_effect(model: ModelConfig, layout: Layout) -> Iterator[str]:
    """Yields a sentence for each field without effect that is not at its default."""
    for need, field, value in _without_effect(model, layout):
        yield f"{field}={quoted(value)} has no effect without {need.words}"


def _without_effect(model: ModelConfig, layout: Layout) -> Iterator[tuple[_Need, str, Any]]:
    sections: dict[str, Any] = {"model": model, "layout": layout}
    for need in _NEEDS:
        for field in need.fields if not need.met(model, layout) else ():
            section, _, name = field.partition(".")
            value = getattr(sections[section], name)
            if value != getattr(_default(section), name):
                yield need, field, value


@functools.cache
def _default(section: str) -> Any:
    """A section with no field set."""
    return {"model": ModelConfig, "layout": Layout}[section]()


def check_layout(model: ModelConfig, layout: Layout) -> None:
    """Raises UserError if the model cannot run with the layout."""
    if layout.unfused_attention and model.attention == "cudnn":
        raise UserError(
            f"{layout.unfused_attention} has no fused attention kernel; use model.attention=xla"
        )
    if layout.has_grid and model.kernels == "triton":
        raise UserError(
            "model.kernels=triton: norms need all elements of a token, but a grid (layout.row, "
            "layout.col) splits them; use model.kernels=xla"
        )
    _check_offload(model, layout)
    for name, there in (
        ("attention_sinks=true", model.block.attention_sinks),
        (f"attention_softcap={model.attention_softcap}", model.attention_softcap),
    ):
        if there and layout.unfused_attention:
            raise UserError(
                f"model.{name} with {layout.unfused_attention}: it makes whole rows of scores, and "
                "has neither sinks nor a cap; use another ring, or layout.attention2d=heads"
            )
    _check_ulysses(model, layout)
    if model.latent and layout.has_grid:
        raise UserError(
            "model.latent with a grid (layout.row, layout.col): a grid splits every matrix over "
            "rows and columns, and latent vectors are whole on each device; use layout.tp instead"
        )
    if model.moe:
        check_experts(model, layout)


def _check_ulysses(model: ModelConfig, layout: Layout) -> None:
    """Raises UserError unless the heads of each device along tp split over ulysses."""
    heads, keys, tp = model.num_heads, model.block.num_kv_heads, layout.tp
    if layout.ulysses == 1:
        return
    if model.images:
        raise UserError(
            f"layout.ulysses={layout.ulysses} splits sequences; images are split in strips by "
            "layout.cp"
        )
    if heads % tp or (keys % tp and tp % keys):
        raise UserError(
            f"layout.ulysses={layout.ulysses} with layout.tp={tp}: model.num_heads={heads} and "
            f"num_kv_heads={keys} need padding to split over tp; use another tp, or layout.cp"
        )
    each, shared = heads // tp, max(1, keys // tp)
    fits = [n for n in range(1, each + 1) if each % n == 0 and (shared % n == 0 or n % shared == 0)]
    if layout.ulysses not in fits:
        raise UserError(
            f"layout.ulysses={layout.ulysses} does not split the heads of a device along tp, "
            f"{each} of queries and {shared} of keys; use one of {', '.join(map(str, fits))}"
        )


def _check_offload(model: ModelConfig, layout: Layout) -> None:
    nothing_kept = model.remat != "dots" or model.remat_layers == 0
    if "activations" in layout.offloaded and nothing_kept:
        layers = "" if model.remat_layers is None else f", model.remat_layers={model.remat_layers}"
        raise UserError(
            f"layout.offload=activations with model.remat={model.remat}{layers}: it offloads what "
            "model.remat=dots saves; use model.remat=dots"
        )
