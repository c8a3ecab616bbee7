"""Predicts a device's memory in a training step of this library.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model, F hidden, N
heads, all padded; M micro-batches, L layers. Bytes are of one device.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxptd.config import Config, ModelConfig, Remat, itemsize
from jaxptd.costs.kept import MOST, SOME, Kept, by
from jaxptd.layout import Axis, Layout
from jaxptd.models.families import architecture_of, sizes_of
from jaxptd.optimizers.moments import kept
from jaxptd.parts.architecture import Stack
from jaxptd.parts.sizes import Sizes, elements_on_device
from jaxptd.pipeline.placement import Stages, of_stack
from jaxptd.zero.plan import ShardShape, StateShapes

# ---- parameters, gradients and optimizer ---------------------------------------------------------


def state(config: Config, zero: StateShapes) -> dict[str, int]:
    """Bytes of parameters, gradients, the optimizer's moments, and gathered parameters.

    Parameters and moments are in device or host memory (`layout.offload`). Gathered are whole
    parameters that a step holds from beginning to end, besides the state, and shards of which the
    state has a part.
    """
    layout, wide = config.layout, sizes_of(config).master_itemsize

    def whole(name: str) -> int:  # every stage has a copy of parameters outside of layers
        info = zero.infos[name]
        shared = Axis.PP in info.axes and info.stack is None
        return elements_on_device(info, layout) * (layout.pp if shared else 1)

    def shard(name: str) -> int:  # all parts of it, if replicas split it
        stored = zero.stored[name]
        parts = stored.parts if isinstance(stored, ShardShape) else 1
        return elements_on_device(stored, layout) * parts

    def summed(name: str) -> int:
        return shard(name) if zero.plans[name].reduce == "each_layer" else whole(name)

    parameters = sum(elements_on_device(s, layout) for s in zero.stored.values()) * wide
    rule = config.optimizer
    moments = [moment for each in zero.stored.values() for moment in kept(rule, each)]
    # Names of the parameters that are gathered and held for a step.
    gathered = [n for n, plan in zero.plans.items() if plan.gather in ("step", "first_microbatch")]
    joined = [n for n, plan in zero.plans.items() if zero.split and plan.gather == "layer"]
    held = {n: whole(n) for n in gathered} | {n: shard(n) for n in joined}
    return {
        "parameters": parameters,
        "gradients": sum(summed(n) for n, info in zero.infos.items() if not info.frozen) * wide,
        "optimizer": sum(elements_on_device(m, layout) for m in moments) * wide,
        "gathered": sum(n * itemsize(zero.plans[each].gather_dtype) for each, n in held.items()),
    }


def narrowed(config: Config, zero: StateShapes) -> int:
    """Bytes by which unaccumulated gradients are smaller than in `state`: `narrows`."""
    if config.train.micro_batches * config.layout.batch_shards > 1:
        return 0
    wide = sizes_of(config).master_itemsize
    return sum(
        elements_on_device(info, config.layout) * (wide - itemsize(zero.plans[name].grad_dtype))
        for name, info in zero.infos.items()
        if zero.plans[name].narrows and not info.frozen
    )


def hosted(layout: Layout, state: Mapping[str, int]) -> int:
    """Bytes of parameters and moments that are in host memory; state: as `state` gives it."""
    parameters = state["parameters"] if layout.hosts_parameters else 0
    return parameters + (state["optimizer"] if layout.hosts_moments else 0)


# ---- activations, as saved here ------------------------------------------------------------------


_ORDINALS = ("first", "second", "third", "fourth")


def kept_by_layer(config: Config, stack: Stack) -> Iterator[Kept]:
    """Every tensor of one layer and one micro-batch that some policy saves.

    Args:
        config: of the run.
        stack: of the layer.
    """
    if stack.period > 1:
        for each in stack.in_turn:
            yield from kept_by_layer(config, each)
        return
    sizes = sizes_of(config).with_tokens(stack.tokens, stack.hidden)
    x, statistics = sizes.stream, stack.norm.kept(sizes)
    for number, part in enumerate(stack.parts):
        norm, has_norm = _ORDINALS[number], stack.has_norm(number)
        taken, outputs = part.taken(sizes), stack.norms_outputs
        only_outputs = stack.norm_order == "output"
        if number == 0:
            again = by("dots", "full") if only_outputs and taken != x else MOST | by("full")
            yield Kept("the layer's input", x, again)
        elif has_norm and not only_outputs:
            yield Kept(f"input of the {norm} norm", x, SOME)
        if has_norm and not only_outputs:
            yield Kept(f"statistics of the {norm} norm", statistics, MOST)
        if outputs:
            yield Kept(f"statistics of the norm of {part.title}'s output", statistics, MOST)
            yield Kept(f"output of {part.title}, before its norm", x, MOST)
        copies = number > 0 or taken != x if only_outputs else has_norm or sizes.copies_taken
        if copies:
            yield Kept(f"input of the {part.first_title}", taken, SOME)
        yield from part.kept_of_source(sizes)
        yield from part.kept(sizes)
        yield from part.adapters_kept(sizes)
        if stack.norm_order == "post" or (number < stack.read_inside and not outputs):
            yield Kept(f"the residual sum after {part.title}", x, by("dots"))
    if not sizes.traces_layers:  # otherwise they are derived again
        yield from _seeds(sizes, stack)


def _seeds(sizes: Sizes, stack: Stack) -> Iterator[Kept]:
    """Dropout seeds, per sample and pair and per head; factors of dropped paths."""
    model, parts = sizes.config.model, len(stack.parts)
    streams, inner = stack.samples(sizes, sizes.stream_rows), stack.samples(sizes, sizes.rows)
    heads = sum(part.heads_on_device(sizes) for part in stack.parts)
    if model.dropout:
        yield Kept("seeds of dropout", 8 * (streams * parts + inner * heads), by("none"))
    if stack.of_images and model.drops:
        factors = streams * parts * sizes.itemsize
        yield Kept("factors of dropped paths", factors, by("none"))


def layer(config: Config, stack: Stack, remat: Remat) -> int:
    """Bytes that one layer of a stack saves for backward of one micro-batch."""
    return sum(kept.bytes * kept.times.get(remat, 0) for kept in kept_by_layer(config, stack))


class DeviceLayers(NamedTuple):
    """Identical layers of one device, and how many micro-batches they hold at once."""

    stack: Stack
    remat: Remat
    layers: int
    micro_batches: int


def stacks(config: Config, plan: Stages | None = None) -> list[DeviceLayers]:
    """The layers of a device; in a pipeline, those of every stack's largest part.

    Where backward starts from the input of a model part, everything that the part's layers save
    exists for one micro-batch, while backward runs.
    """
    return [
        DeviceLayers(parts, remat, count, plan.slots[of_stack("saved", parts.name)] if plan else 1)
        for parts in architecture_of(config.padded_model).stacks
        for remat, count in _remats(config.model, plan, parts)
    ]


def _remats(model: ModelConfig, plan: Stages | None, parts: Stack) -> Sequence[tuple[Remat, int]]:
    layers = plan.depth(parts.name) if plan else parts.layers
    return [("none", layers)] if plan and plan.recompute else model.remats(layers)


def activations(config: Config, plan: Stages | None = None) -> int:
    """Bytes that all layers of a device save for backward."""
    return sum(
        each.layers * each.micro_batches * layer(config, each.stack, each.remat)
        for each in stacks(config, plan)
    )


def behind(config: Config) -> int:
    """Bytes that the layers of MTP modules save for one micro-batch, with what each takes.

    They run with the head. A pipeline has their forward and backward in one operation.
    """
    layers, model = architecture_of(config.padded_model).layers_behind, config.model
    ((remat, _),) = model.remats(1)
    stream = sizes_of(config).stream
    return sum(layer(config, stack, remat) + 2 * stream for stack in layers)


def mail(config: Config, plan: Stages) -> int:
    """Bytes of activations and gradients that wait for their operation on a pipeline's stage."""
    streams = architecture_of(config.padded_model).streams(sizes_of(config))
    return plan.slots["mail"] * sum(streams)
