"""Predicts the memory of a device in a training step, as this library does it.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model, F hidden, N
heads, all as padded; M micro-batches, L layers. Bytes are of one device.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxptd.analysis.sizes import AttentionSizes, Sizes, WindowSizes, elements_on_device
from jaxptd.config import Config, ModelConfig, Remat, itemsize
from jaxptd.layout import Axis, Layout
from jaxptd.models.architecture import MLP, Attention, Stack, Sublayer
from jaxptd.optimizers.moments import MOMENTS
from jaxptd.pipeline.placement import Stages, of_stack
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
        scattered = zero.plans[name].reduce == "each_layer"
        return elements_on_device(zero.stored[name], layout) if scattered else whole(name)

    parameters = sum(elements_on_device(s, layout) for s in zero.stored.values()) * wide
    kept = MOMENTS[config.optimizer.name].kept
    moments = [moment for each in zero.stored.values() for moment in kept(each)]
    # Names of the parameters that are gathered for a step, and kept.
    gathered = [n for n, plan in zero.plans.items() if plan.gather in ("step", "first_microbatch")]
    return {
        "parameters": parameters,
        "gradients": sum(map(summed, zero.infos)) * wide,
        "optimizer": sum(elements_on_device(m, layout) for m in moments) * wide,
        "gathered": sum(whole(n) * itemsize(zero.plans[n].gather_dtype) for n in gathered),
    }


def narrowed(config: Config, zero: StateShapes) -> int:
    """Bytes that gradients of a step which sums none are less than in `state`: `narrows`."""
    if config.train.micro_batches * config.layout.dp * config.layout.cp > 1:
        return 0
    wide = Sizes(config).master_itemsize
    return sum(
        elements_on_device(info, config.layout) * (wide - itemsize(zero.plans[name].grad_dtype))
        for name, info in zero.infos.items()
        if zero.plans[name].narrows
    )


def hosted(layout: Layout, state: Mapping[str, int]) -> int:
    """Bytes of parameters and moments that are in host memory; state: as `state` gives it."""
    parameters = state["parameters"] if layout.hosts_parameters else 0
    return parameters + (state["optimizer"] if layout.hosts_moments else 0)


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
_ORDINALS = ("first", "second", "third", "fourth")
_MOST, _SOME = _by("none", "attention", "dots"), _by("none", "attention")


def kept_by_layer(config: Config, stack: Stack) -> Iterator[Kept]:
    """Every tensor of one layer and one micro-batch that some policy keeps.

    Args:
        config: of the run.
        stack: of the layer.
    """
    sizes = Sizes(config).of_stack(stack)
    x, statistics = _stream(sizes), stack.statistics * sizes.stream_rows * sizes.master_itemsize
    for number, sublayer in enumerate(stack.sublayers):
        first, last, norm = number == 0, number == len(stack.sublayers) - 1, _ORDINALS[number]
        name, product = _names(sublayer)
        if first:
            yield Kept("the layer's input", x, _MOST | _by("full"))
        else:
            yield Kept(f"input of the {norm} norm", x, _SOME)
        yield Kept(f"statistics of the {norm} norm", statistics, _MOST)
        yield Kept(f"input of the {product}", _taken(sizes), _SOME)
        yield from _source(config, sublayer)
        yield from _between(sizes, sublayer)
        if stack.norms_sums or not last:
            yield Kept(f"the residual sum after {name}", x, _by("dots"))
    if not sizes.traces_layers:  # else they are derived again
        yield from _seeds(sizes, stack)


def _seeds(sizes: Sizes, stack: Stack) -> Iterator[Kept]:
    """Seeds of dropout, for each sample and pair, and each head; factors of dropped paths."""
    model, sublayers = sizes.config.model, len(stack.sublayers)
    streams, inner = sizes.samples(sizes.stream_rows, stack), sizes.samples(sizes.rows, stack)
    heads = sum(each.heads for each in sizes.attentions(stack))
    heads += sum(each.heads for each in sizes.windows(stack))
    if model.dropout:
        yield Kept("seeds of dropout", 8 * (streams * sublayers + inner * heads), _by("none"))
    if stack.windows and model.drops:
        factors = streams * sublayers * sizes.itemsize
        yield Kept("factors of dropped paths", factors, _by("none"))


def _names(sublayer: Sublayer) -> tuple[str, str]:
    """The name of a pair, and that of its first product."""
    if isinstance(sublayer, MLP):
        return _MLP
    has_source = isinstance(sublayer, Attention) and sublayer.source is not None
    return _CROSS if has_source else _ATTENTION


def _stream(sizes: Sizes) -> int:
    """Bytes of the residual stream."""
    return sizes.stream_rows * (sizes.hidden // sizes.config.layout.col) * sizes.itemsize


def _taken(sizes: Sizes) -> int:
    """Bytes kept of what a first product takes: x as it is, or all rows of it, gathered."""
    config = sizes.config
    whole = config.layout.gathers_inputs and not config.gathers_again
    return sizes.tokens * sizes.hidden * sizes.itemsize if whole else _stream(sizes)


def _source(config: Config, sublayer: Sublayer) -> Iterator[Kept]:
    """The other sequence of cross-attention, with a norm in each layer.

    No layer changes it: without remat one loop over all layers normalises it once.
    """
    if (
        not isinstance(sublayer, Attention)
        or sublayer.source is None
        or not sublayer.source_statistics
    ):
        return
    sizes = Sizes(config, sublayer.source)
    again = _by("none") if sizes.traces_layers else {}
    statistics = sublayer.source_statistics * sizes.stream_rows * sizes.master_itemsize
    yield Kept("the source", _stream(sizes), _by("attention", "dots", "full") | again)
    yield Kept("statistics of the source's norm", statistics, _by("attention", "dots") | again)
    yield Kept("input of the k, v product", _taken(sizes), _by("attention") | again)


def _between(sizes: Sizes, sublayer: Sublayer) -> Iterator[Kept]:
    """The tensors between the two products of a pair."""
    each, token = sizes.of(sublayer), sizes.tokens * sizes.itemsize
    inner = token * each.second // sizes.matrix_shards
    if isinstance(each, AttentionSizes):
        yield from _queries_keys_values(each, inner)
        yield from _attention(each, inner)
    elif isinstance(each, WindowSizes):
        yield from _windows(each, inner)
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
        keys_values = tokens * attention.made_keys // sizes.matrix_shards
        yield Kept("slices of k, v", 2 * keys_values * sizes.itemsize, _by("dots"))
        yield Kept("gathered k, v", kv, _SOME)
        yield Kept("q", queries, _MOST)
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
    """The bias of each distance, where each layer that is traced by itself makes its own."""
    if attention.part.has_bias and attention.sizes.traces_layers:
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
        yield from _bias(attention)
        return
    scores = rows * attention.part.key_tokens // (layout.col if blocks else 1)
    yield Kept("attention's output", output, _MOST)
    yield Kept("probabilities, before and after dropout", scores * (wide + narrow), _by("none"))
    yield Kept("sums and maxima of their rows", rows * (2 * wide + blocks), _by("none"))


def _windows(windows: WindowSizes, output: int) -> Iterator[Kept]:
    """Queries, keys and values, of which backward computes scores again, and attention's output."""
    bias = windows.heads * windows.part.reach**2 * windows.sizes.master_itemsize
    yield Kept("q, k, v", 3 * output, _MOST)
    yield Kept("biases of scores", bias, _by("none"))
    yield Kept("attention's output", output, _by("none", "dots"))


def layer(config: Config, stack: Stack, remat: Remat) -> int:
    """Bytes that one layer of a stack keeps for backward of one micro-batch."""
    return sum(kept.bytes * kept.times.get(remat, 0) for kept in kept_by_layer(config, stack))


class DeviceLayers(NamedTuple):
    """Layers of one device that are alike, and their micro-batches at one time."""

    parts: Stack
    remat: Remat
    layers: int
    micro_batches: int


def stacks(config: Config, plan: Stages | None = None) -> list[DeviceLayers]:
    """The layers of a device; in a pipeline those of the largest part, of every stack.

    Where backward starts from the input of a part of the model, everything that the part's layers
    keep exists for one micro-batch, while backward runs.
    """
    return [
        DeviceLayers(parts, remat, count, plan.slots[of_stack("saved", parts.name)] if plan else 1)
        for parts in Sizes(config).architecture.stacks
        for remat, count in _remats(config.model, plan, parts)
    ]


def _remats(model: ModelConfig, plan: Stages | None, parts: Stack) -> Sequence[tuple[Remat, int]]:
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
