"""Predicts the memory of a device in a training step: as published, and as this library does it.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model, F hidden, N
heads, all as padded; M micro-batches, L layers. Bytes are of one device.
Source: Korthikanti et al., arXiv 2205.05198, section 4 (activations); Zhu and Dong, CAAI Trans.
Intelligent Systems 20(5), 2025, table 1 (state; everything on a grid of N devices is 1/N).
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxptd.analysis.sizes import Sizes, elements_on_device
from jaxptd.config import Config, Remat
from jaxptd.mesh import Axis
from jaxptd.params import ParamInfo
from jaxptd.pipeline.plan import Plan
from jaxptd.step.optimizer import DIRECTIONS
from jaxptd.zero import Zero

# ---- parameters, gradients and optimizer ---------------------------------------------------------


def state(config: Config, zero: Zero) -> dict[str, int]:
    """Bytes of parameters, gradients, the optimizer's moments, and gathered parameters.

    Parameters and moments are in the device's memory or in the host's (`layout.offload`). Gathered
    are whole parameters that a step keeps from its beginning to its end, beside the state's.
    """
    layout, wide = config.layout, Sizes(config).master_itemsize

    def whole(name: str) -> int:  # every stage has a copy of parameters outside of layers
        info = zero.infos[name]
        shared = Axis.PP in info.axes and not info.stacked
        return elements_on_device(info, layout) * (layout.pp if shared else 1)

    def summed(name: str) -> int:
        per_layer = zero.per_layer(name)
        return elements_on_device(zero.stored[name], layout) if per_layer else whole(name)

    parameters = sum(elements_on_device(s, layout) for s in zero.stored.values()) * wide
    kept = DIRECTIONS[config.optimizer.name].moments
    moments = [moment for each in zero.stored.values() for moment in kept(each)]
    gathered = _gathered_for_the_step(config, zero)
    return {
        "parameters": parameters,
        "gradients": sum(map(summed, zero.infos)) * wide,
        "optimizer": sum(elements_on_device(m, layout) for m in moments) * wide,
        "gathered": sum(whole(n) * zero.gather_dtype(n).itemsize for n in gathered),
    }


def _gathered_for_the_step(config: Config, zero: Zero) -> list[str]:
    """Names of the parameters that are gathered at the beginning of a step and kept."""
    ends = [name for name, info in zero.infos.items() if not info.stacked]
    if zero.stage or zero.copies:
        return ends if zero.stage == 3 else list(zero.infos)
    return ends if config.layout.pp > 1 else []


_FROM_STAGE = {"parameters": 3, "gradients": 2, "optimizer": 1}  # of ZeRO, as published


def published_state(config: Config, infos: Mapping[str, ParamInfo]) -> dict[str, int]:
    """Bytes of the state by table 1: P/N, G/N, A/N on N devices; with ZeRO's third stage 2P/N."""
    layout, sizes = config.layout, Sizes(config)
    devices = sizes.matrix_shards * layout.pp
    whole = sum(math.prod(info.shape) for info in infos.values()) * sizes.master_itemsize / devices
    shards = {n: layout.dp * layout.cp if layout.zero >= z else 1 for n, z in _FROM_STAGE.items()}
    copies = {"parameters": 2 if layout.zero >= 3 else 1, "gradients": 1, "optimizer": 2}
    return {name: round(copies[name] * whole / shards[name]) for name in _FROM_STAGE}


# ---- activations, as published -------------------------------------------------------------------


def published_layer(config: Config, remat: Remat) -> int | None:
    """Bytes that one layer keeps of one micro-batch: 16-bit activations, masks of one byte.

    None for `dots`, about which nothing is published.
    """
    layout, model, sizes = config.layout, config.model, Sizes(config)
    sbh = sizes.tokens * model.hidden_size
    scores = 5 * model.num_heads * model.seq_length / model.hidden_size
    shards = sizes.matrix_shards
    replicated = layout.tp > 1 and not layout.sequence_parallel  # norms and residuals
    if remat == "dots":
        return None
    if remat == "full":
        return round(sbh * 2 / (1 if replicated else shards))
    scores = scores if remat == "none" else 0
    return round(sbh * (10 + (24 + scores) / shards if replicated else (34 + scores) / shards))


# ---- activations, as kept here -------------------------------------------------------------------


class Kept(NamedTuple):
    """A tensor that the backward pass of a layer needs.

    Args:
        name: in words.
        bytes: of the tensor.
        times: how often each policy keeps it.
    """

    name: str
    bytes: int
    times: Mapping[Remat, int]


def _by(*policies: Remat) -> dict[Remat, int]:
    return dict.fromkeys(policies, 1)


def kept_by_layer(config: Config) -> Iterator[Kept]:
    """Every tensor of one layer and one micro-batch that some policy keeps."""
    layout, model, sizes = config.layout, config.model, Sizes(config)
    rows = sizes.rows // (layout.tp if layout.sequence_parallel else 1)
    x = rows * (sizes.hidden // layout.col) * sizes.itemsize
    # A column product takes x as it is kept, or all rows of it, gathered.
    takes_shard = layout.has_grid or layout.collective_matmul
    taken = x if takes_shard else sizes.tokens * model.hidden_size * sizes.itemsize
    heads = sizes.tokens * sizes.attention // sizes.matrix_shards * sizes.itemsize
    hidden = sizes.tokens * sizes.mlp // sizes.matrix_shards * sizes.itemsize
    statistics = (2 if model.block.norm == "layernorm" else 1) * rows * sizes.master_itemsize
    most, some = _by("none", "attention", "dots"), _by("none", "attention")
    yield Kept("the layer's input", x, most | _by("full"))
    yield Kept("statistics of the first norm", statistics, most)
    yield Kept("input of the product that makes q, k, v", taken, some)
    yield from _queries_keys_values(config, heads)
    yield from _attention(config, heads)
    yield Kept("attention's part of the residual sum", x, _by("dots"))
    yield Kept("input of the second norm", x, some)
    yield Kept("statistics of the second norm", statistics, most)
    yield Kept("input of the up product", taken, some)
    yield Kept("input of the activation", hidden * sizes.up // sizes.mlp, most)
    yield Kept("input of the down product", hidden, some)
    if model.dropout and layout.pp == 1:  # a pipeline derives them again
        yield Kept("seeds of dropout", 8 * sizes.sequences * (2 + sizes.heads), _by("none"))


def _queries_keys_values(config: Config, queries: int) -> Iterator[Kept]:
    """The product, or what becomes of it: with a norm of q and k both exist.

    queries: bytes of them.
    """
    sizes = Sizes(config)
    kv = 2 * sizes.rows * sizes.keys * sizes.itemsize
    if sizes.gathers_kv:
        slices = 2 * sizes.tokens * sizes.made_keys // sizes.matrix_shards * sizes.itemsize
        yield Kept("q, slices of k, v", queries + slices, _by("attention", "dots"))
        yield Kept("gathered k, v", kv, _by("none", "attention"))
        yield Kept("q", queries, _by("none"))
    else:
        yield Kept("q, k, v", queries + kv, _by("none", "attention", "dots"))
    if config.model.block.qk_norm:
        normed = sizes.rows * (sizes.heads + sizes.kv_heads) * sizes.master_itemsize
        yield Kept("q and k before their norm", queries + kv // 2, _by("none"))
        yield Kept("statistics of the norms of q and k", normed, _by("none", "attention", "dots"))


def _attention(config: Config, output: int) -> Iterator[Kept]:
    """A kernel's output and logsumexp; without a kernel also the probabilities of whole rows.

    On a grid `dots` keeps a kernel's output twice: as computed, and with heads in one dimension.
    """
    model, layout, sizes = config.model, config.layout, Sizes(config)
    narrow, wide, blocks = sizes.itemsize, sizes.master_itemsize, sizes.has_blocks
    rows = sizes.rows * sizes.heads
    if not blocks and (layout.ring != "rsa" or layout.ring_size == 1):
        yield Kept("attention's output", output, {"none": 1, "dots": 2 if layout.has_grid else 1})
        yield Kept("logsumexp", rows * wide, _by("none", "dots"))
        return
    scores = rows * model.seq_length // (layout.col if blocks else 1)
    yield Kept("attention's output", output, _by("none", "attention", "dots"))
    yield Kept("probabilities, before and after dropout", scores * (wide + narrow), _by("none"))
    yield Kept("sums and maxima of their rows", rows * (2 * wide + blocks), _by("none"))


def layer(config: Config, remat: Remat) -> int:
    """Bytes that one layer keeps for backward of one micro-batch."""
    return sum(kept.bytes * kept.times.get(remat, 0) for kept in kept_by_layer(config))


class Stack(NamedTuple):
    """Layers of one device under the same policy, and their micro-batches at one time."""

    remat: Remat
    layers: int
    micro_batches: int


def stacks(config: Config, plan: Plan | None = None) -> list[Stack]:
    """The layers of a device; in a pipeline those of the largest stage.

    Where backward starts from the input of a part of the model, everything that the part's layers
    keep exists for one micro-batch, while backward runs.
    """
    model = config.model
    if plan is None:
        return [Stack(remat, count, 1) for remat, count in model.remats(model.num_layers)]
    slots = plan.slots["saved"]
    again: list[tuple[Remat, int]] = [("none", plan.depth)]
    remats = again if plan.recompute else model.remats(plan.depth)
    return [Stack(remat, count, slots) for remat, count in remats]


def activations(config: Config, plan: Plan | None = None) -> int:
    """Bytes that all layers of a device keep for backward."""
    return sum(s.layers * s.micro_batches * layer(config, s.remat) for s in stacks(config, plan))


def mail(config: Config, plan: Plan) -> int:
    """Bytes of activations and gradients that wait for their operation on a pipeline's stage."""
    return plan.slots["mail"] * next(kept_by_layer(config)).bytes
