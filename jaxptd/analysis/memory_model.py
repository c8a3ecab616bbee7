"""Predicts the memory of a device in a training step: as published, and as this library does it.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model, F hidden, N
heads, all as padded; M micro-batches, L layers. Bytes are of one device.
Source: Korthikanti et al., arXiv 2205.05198, section 4 (activations); Zhu and Dong, CAAI Trans.
Intelligent Systems 20(5), 2025, table 1 (state; everything on a grid of N devices is 1/N).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxptd.analysis.sizes import AttentionSizes, Sizes, elements_on_device
from jaxptd.config import Config, ModelConfig, Remat, itemsize
from jaxptd.layout import Axis
from jaxptd.models.inventory import MLP, Attention, Pair
from jaxptd.models.inventory import Stack as Parts
from jaxptd.optimizers.moments import MOMENTS
from jaxptd.pipeline.placement import Stages, of_stack
from jaxptd.shapes import ParamShape
from jaxptd.zero.shapes import StateShapes

# ---- parameters, gradients and optimizer ---------------------------------------------------------


def state(config: Config, zero: StateShapes) -> dict[str, int]:
    """Bytes of parameters, gradients, the optimizer's moments, and gathered parameters.

    Parameters and moments are in the device's memory or in the host's (`layout.offload`). Gathered
    are whole parameters that a step keeps from its beginning to its end, beside the state's.
    """
    layout, wide = config.layout, Sizes(config).master_itemsize

    def whole(name: str) -> int:  # every stage has a copy of parameters outside of layers
        info = zero.infos[name]
        shared = Axis.PP in info.axes and info.stack is None
        return elements_on_device(info, layout) * (layout.pp if shared else 1)

    def summed(name: str) -> int:
        per_layer = zero.per_layer(name)
        return elements_on_device(zero.stored[name], layout) if per_layer else whole(name)

    parameters = sum(elements_on_device(s, layout) for s in zero.stored.values()) * wide
    kept = MOMENTS[config.optimizer.name].kept
    moments = [moment for each in zero.stored.values() for moment in kept(each)]
    gathered = _gathered_for_the_step(config, zero)
    return {
        "parameters": parameters,
        "gradients": sum(map(summed, zero.infos)) * wide,
        "optimizer": sum(elements_on_device(m, layout) for m in moments) * wide,
        "gathered": sum(whole(n) * itemsize(zero.gather_dtype(n)) for n in gathered),
    }


def _gathered_for_the_step(config: Config, zero: StateShapes) -> list[str]:
    """Names of the parameters that are gathered at the beginning of a step and kept."""
    ends = [name for name, info in zero.infos.items() if info.stack is None]
    if zero.stage or zero.copies:
        return ends if zero.stage == 3 else list(zero.infos)
    return ends if config.layout.pp > 1 else []


_FROM_STAGE = {"parameters": 3, "gradients": 2, "optimizer": 1}  # of ZeRO, as published


def published_state(config: Config, infos: Mapping[str, ParamShape]) -> dict[str, int]:
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
    layout, model, sizes = config.layout, config.padded_model, Sizes(config)
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


# Of each pair its name, and that of its first product.
_ATTENTION, _CROSS = ("attention", "product that makes q, k, v"), ("cross-attention", "q product")
_MLP = ("the MLP", "up product")
_ORDINALS = ("first", "second", "third")
_MOST, _SOME = _by("none", "attention", "dots"), _by("none", "attention")


def kept_by_layer(config: Config, stack: Parts) -> Iterator[Kept]:
    """Every tensor of one layer and one micro-batch that some policy keeps.

    Args:
        config: of the run.
        stack: of the layer.
    """
    sizes = Sizes(config).of_stack(stack)
    x, statistics = _stream(sizes), stack.statistics * _rows(sizes) * sizes.master_itemsize
    for number, pair in enumerate(stack.pairs):
        first, last, norm = number == 0, number == len(stack.pairs) - 1, _ORDINALS[number]
        name, product = _names(pair)
        if first:
            yield Kept("the layer's input", x, _MOST | _by("full"))
        else:
            yield Kept(f"input of the {norm} norm", x, _SOME)
        yield Kept(f"statistics of the {norm} norm", statistics, _MOST)
        yield Kept(f"input of the {product}", _taken(sizes), _SOME)
        yield from _source(config, pair)
        yield from _between(sizes, pair)
        if stack.norms_sums or not last:
            yield Kept(f"the residual sum after {name}", x, _by("dots"))
    if config.model.dropout and not sizes.traces_layers:  # else they are derived again
        heads = sum(each.heads for each in sizes.attentions(stack))
        seeds = 8 * sizes.sequences * (len(stack.pairs) + heads)
        yield Kept("seeds of dropout", seeds, _by("none"))


def _names(pair: Pair) -> tuple[str, str]:
    """The name of a pair, and that of its first product."""
    if isinstance(pair, MLP):
        return _MLP
    return _ATTENTION if pair.source is None else _CROSS


def _rows(sizes: Sizes) -> int:
    """Tokens of a micro-batch in a device's residual stream."""
    layout = sizes.config.layout
    return sizes.rows // (layout.tp if layout.sequence_parallel else 1)


def _stream(sizes: Sizes) -> int:
    """Bytes of the residual stream."""
    return _rows(sizes) * (sizes.hidden // sizes.config.layout.col) * sizes.itemsize


def _taken(sizes: Sizes) -> int:
    """Bytes kept of what a first product takes: x as it is, or all rows of it, gathered."""
    config = sizes.config
    whole = config.layout.gathers_inputs and not config.gathers_again
    return sizes.tokens * config.model.hidden_size * sizes.itemsize if whole else _stream(sizes)


def _source(config: Config, pair: Pair) -> Iterator[Kept]:
    """The other sequence of cross-attention, with a norm in each layer.

    No layer changes it: without remat one loop over all layers normalises it once.
    """
    if not isinstance(pair, Attention) or pair.source is None or not pair.source_statistics:
        return
    sizes = Sizes(config, pair.source)
    again = _by("none") if sizes.traces_layers else {}
    statistics = pair.source_statistics * _rows(sizes) * sizes.master_itemsize
    yield Kept("the source", _stream(sizes), _by("attention", "dots", "full") | again)
    yield Kept("statistics of the source's norm", statistics, _by("attention", "dots") | again)
    yield Kept("input of the k, v product", _taken(sizes), _by("attention") | again)


def _between(sizes: Sizes, pair: Pair) -> Iterator[Kept]:
    """The tensors between the two products of a pair."""
    each, token = sizes.of(pair), sizes.tokens * sizes.itemsize
    inner = token * each.second // sizes.matrix_shards
    if isinstance(each, AttentionSizes):
        yield from _queries_keys_values(each, inner)
        yield from _bias(each)
        yield from _attention(each, inner)
    else:
        yield Kept("input of the activation", inner * each.first // each.second, _MOST)
        yield Kept("input of the down product", inner, _SOME)


def _queries_keys_values(attention: AttentionSizes, queries: int) -> Iterator[Kept]:
    """The product, or what becomes of it: with a norm of q and k both exist.

    queries: bytes of them.
    """
    sizes = attention.sizes
    kv = 2 * attention.of_keys(sizes.rows) * attention.keys * sizes.itemsize
    if attention.gathers_kv:
        tokens = attention.of_keys(sizes.tokens)
        made = tokens * attention.made_keys // sizes.matrix_shards
        slices = 2 * made * sizes.itemsize
        yield Kept("q, slices of k, v", queries + slices, _by("attention", "dots"))
        yield Kept("gathered k, v", kv, _SOME)
        yield Kept("q", queries, _by("none"))
    else:
        parts = sizes.config.layout.cp if sizes.has_blocks else 1  # that attention gathers
        yield Kept("q, k, v", queries + kv, _by("attention", "dots"))
        yield Kept("q, k, v as attention takes them", queries + parts * kv, _by("none"))
    if attention.part.has_norm:
        keys = attention.of_keys(sizes.rows) * attention.kv_heads
        normed = (sizes.rows * attention.heads + keys) * sizes.master_itemsize
        yield Kept("q and k before their norm", queries + kv // 2, _by("none"))
        yield Kept("statistics of the norms of q and k", normed, _MOST)


def _bias(attention: AttentionSizes) -> Iterator[Kept]:
    """The bias of each distance, where each layer of a pipeline or of ZeRO's loop makes its own."""
    config = attention.sizes.config
    if attention.part.has_bias and (config.layout.pp > 1 or config.prefetches):
        distances = 2 * attention.part.tokens - 1
        size = attention.heads * distances * attention.sizes.master_itemsize
        yield Kept("biases by distance", size, _by("none"))


def _attention(attention: AttentionSizes, output: int) -> Iterator[Kept]:
    """A kernel's output and logsumexp; without a kernel also the probabilities of whole rows.

    On a grid `dots` keeps a kernel's output twice: as computed, and with heads in one dimension.
    """
    sizes, layout = attention.sizes, attention.sizes.config.layout
    narrow, wide, blocks = sizes.itemsize, sizes.master_itemsize, sizes.has_blocks
    rows = sizes.rows * attention.heads
    if not blocks and (layout.ring != "rsa" or layout.ring_size == 1):
        yield Kept("attention's output", output, {"none": 1, "dots": 2 if layout.has_grid else 1})
        yield Kept("logsumexp", rows * wide, _by("none", "dots"))
        return
    scores = rows * attention.part.key_tokens // (layout.col if blocks else 1)
    yield Kept("attention's output", output, _MOST)
    yield Kept("probabilities, before and after dropout", scores * (wide + narrow), _by("none"))
    yield Kept("sums and maxima of their rows", rows * (2 * wide + blocks), _by("none"))


def layer(config: Config, stack: Parts, remat: Remat) -> int:
    """Bytes that one layer of a stack keeps for backward of one micro-batch."""
    return sum(kept.bytes * kept.times.get(remat, 0) for kept in kept_by_layer(config, stack))


class Stack(NamedTuple):
    """Layers of one device that are alike, and their micro-batches at one time."""

    parts: Parts
    remat: Remat
    layers: int
    micro_batches: int


def stacks(config: Config, plan: Stages | None = None) -> list[Stack]:
    """The layers of a device; in a pipeline those of the largest part, of every stack.

    Where backward starts from the input of a part of the model, everything that the part's layers
    keep exists for one micro-batch, while backward runs.
    """
    return [
        Stack(parts, remat, count, plan.slots[of_stack("saved", parts.name)] if plan else 1)
        for parts in Sizes(config).inventory.stacks
        for remat, count in _remats(config.model, plan, parts)
    ]


def _remats(model: ModelConfig, plan: Stages | None, parts: Parts) -> Sequence[tuple[Remat, int]]:
    layers = plan.depth(parts.name) if plan else parts.layers
    return [("none", layers)] if plan and plan.recompute else model.remats(layers)


def activations(config: Config, plan: Stages | None = None) -> int:
    """Bytes that all layers of a device keep for backward."""
    return sum(
        each.layers * each.micro_batches * layer(config, each.parts, each.remat)
        for each in stacks(config, plan)
    )


def mail(config: Config, plan: Stages) -> int:
    """Bytes of activations and gradients that wait for their operation on a pipeline's stage."""
    return plan.slots["mail"] * sum(Sizes(config).streams)
