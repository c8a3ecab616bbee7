"""What a device holds in a training step, by formula: as published, and as this library does it.

`memory` sets both beside what the step's program keeps, and what the compiled one needs.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model, F hidden, N
heads, H head size, all as padded; M micro-batches, L layers. Bytes are of one device.
Source: Korthikanti et al., arXiv 2205.05198, section 4 (activations); Zhu and Dong, CAAI Trans.
Intelligent Systems 20(5), 2025, table 1 (state; everything on a grid of N devices is 1/N).
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jaxptd.analysis.traffic.grid import inside
from jaxptd.config import Config, Remat
from jaxptd.matmul.grid import padded
from jaxptd.mesh import Axis, Layout
from jaxptd.params import ParamInfo, Stored
from jaxptd.pipeline.plan import Plan
from jaxptd.zero import Zero

# ---- parameters, gradients and optimizer ---------------------------------------------------------


def state(config: Config, zero: Zero) -> dict[str, int]:
    """Bytes of parameters, of the optimizer's two moments, and of what a step makes of them.

    The first two lie in the device's memory or in the host's (`layout.offload`). Gathered: whole
    parameters that a step has from its beginning to its end, beside the state's.
    """
    sizes, wide = config.layout.sizes, _wide(config)

    def block(held: Stored) -> int:
        return math.prod(held.held) // math.prod(sizes[Axis(axis)] for axis in held.axes)

    def whole(name: str) -> int:  # a stage holds what is no layer whole
        info = zero.infos[name]
        ends = Axis.PP in info.axes and not info.stacked
        return block(info) * (sizes[Axis.PP] if ends else 1)

    def summed(name: str) -> int:
        return block(zero.stored[name]) if zero.per_layer(name) else whole(name)

    early = [name for name, info in zero.infos.items() if zero.stage < 3 or not info.stacked]
    ends = [name for name, info in zero.infos.items() if not info.stacked]
    copies = early if zero.stage or zero.copies else ends if config.layout.pp > 1 else []
    parameters = sum(map(block, zero.stored.values())) * wide
    return {
        "parameters": parameters,
        "gradients": sum(map(summed, zero.infos)) * wide,
        "optimizer": 2 * parameters,
        "gathered": sum(whole(n) * zero.gather_dtype(n).itemsize for n in copies),
    }


_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the stage at which each is cut there


def published_state(config: Config, infos: Mapping[str, ParamInfo]) -> dict[str, int]:
    """The same by table 1: P/N, G/N, A/N of N devices; with ZeRO's third stage 2P/N."""
    layout = config.layout
    devices = layout.tp * layout.row * layout.col * layout.pp
    whole = sum(math.prod(info.shape) for info in infos.values()) * _wide(config) / devices
    parts = {n: layout.dp * layout.cp if layout.zero >= s else 1 for n, s in _FROM.items()}
    times = {"parameters": 2 if layout.zero >= 3 else 1, "gradients": 1, "optimizer": 2}
    return {name: round(times[name] * whole / parts[name]) for name in _FROM}


# ---- activations, as published -------------------------------------------------------------------


def published_layer(config: Config, remat: Remat) -> int | None:
    """Bytes that one layer keeps of one micro-batch: 16-bit activations, masks of one byte.

    None of `dots`, of which nothing is published.
    """
    layout, model = config.layout, config.model
    sbh = _tokens(config) * model.hidden_size
    scores = 5 * model.num_heads * model.seq_length / model.hidden_size
    cut = layout.tp * layout.row * layout.col
    whole = layout.tp > 1 and not layout.sequence_parallel  # norms and residuals are
    if remat == "dots":
        return None
    if remat == "full":
        return round(sbh * 2 / (1 if whole else cut))
    scores = scores if remat == "none" else 0
    return round(sbh * (10 + (24 + scores) / cut if whole else (34 + scores) / cut))


# ---- activations, as kept here -------------------------------------------------------------------


class Kept(NamedTuple):
    """Something that backward of a layer needs.

    Args:
        name: in words.
        bytes: of it.
        times: how often each policy keeps it.
    """

    name: str
    bytes: int
    times: Mapping[Remat, int]


def _by(*policies: Remat) -> dict[Remat, int]:
    return dict.fromkeys(policies, 1)


def kept_by_layer(config: Config) -> Iterator[Kept]:
    """All that some policy keeps of one layer and one micro-batch."""
    layout, model = config.layout, config.model
    narrow, wide = jnp.dtype(model.dtype).itemsize, _wide(config)
    tokens, grid = _tokens(config), layout.has_grid
    cut = layout.tp * layout.row * layout.col
    rows = tokens // (layout.row * (layout.tp if layout.sequence_parallel else 1))
    x = rows * (_padded(config, model.hidden_size) // layout.col) * narrow
    kept_cut = grid or layout.collective_matmul
    whole = x if kept_cut else tokens * model.hidden_size * narrow  # what a column product takes
    heads = tokens * inside(config) // cut * narrow
    hidden = tokens * _padded(config, model.mlp_size) // cut * narrow
    most, some = _by("none", "attention", "dots"), _by("none", "attention")
    yield Kept("the layer's input", x, most | _by("full"))
    yield Kept("mean and scale of the first norm", 2 * rows * wide, most)
    yield Kept("input of the product that makes q, k, v", whole, some)
    yield Kept("q, k, v", 3 * heads, most)
    yield from _attention(config, heads)
    yield Kept("attention's part of the residual sum", x, _by("dots"))
    yield Kept("input of the second norm", x, some)
    yield Kept("mean and scale of the second norm", 2 * rows * wide, most)
    yield Kept("input of the up product", whole, some)
    yield Kept("input of GELU", hidden, most)
    yield Kept("input of the down product", hidden, some)
    if model.dropout and layout.pp == 1:  # a pipeline makes them again, too
        seeds = 8 * _sequences(config) * (2 + _heads(config))
        yield Kept("seeds of dropout", seeds, _by("none"))


def _attention(config: Config, output: int) -> Iterator[Kept]:
    """A kernel's output and logsumexp; else, of whole rows of scores, their probabilities too.

    `dots` keeps a kernel's output twice on a grid: as it was given, and with heads in one dim.
    """
    model, layout = config.model, config.layout
    narrow, wide = jnp.dtype(model.dtype).itemsize, _wide(config)
    rows = _tokens(config) // layout.row * _heads(config)
    blocks = layout.has_grid and layout.attention2d == "blocks"
    if not blocks and (layout.ring != "rsa" or layout.ring_size == 1):
        twice = 2 if layout.has_grid else 1
        yield Kept("attention's output", output, {"none": 1, "dots": twice})
        yield Kept("logsumexp", rows * wide, _by("none", "dots"))
        return
    scores = rows * model.seq_length // (layout.col if blocks else 1)
    yield Kept("attention's output", output, _by("none", "attention", "dots"))
    yield Kept("probabilities, before and after dropout", scores * (wide + narrow), _by("none"))
    yield Kept("sums and maxima of their rows", rows * (2 * wide + blocks), _by("none"))


def layer(config: Config, remat: Remat) -> int:
    """Bytes that one layer keeps for backward of one micro-batch."""
    return sum(part.bytes * part.times.get(remat, 0) for part in kept_by_layer(config))


class Stack(NamedTuple):
    """Layers of one device that keep the same: how many, and of how many micro-batches at once."""

    remat: Remat
    layers: int
    micro_batches: int


def stacks(config: Config, plan: Plan | None = None) -> list[Stack]:
    """The layers of a device. In a pipeline of its busiest stage, as many as it has rows.

    Where backward starts from a part's input, all that its layers keep is there for one
    micro-batch, while it runs.
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


# ---- sizes ---------------------------------------------------------------------------------------


def _sequences(config: Config) -> int:
    """b."""
    return config.train.global_batch_size // (config.layout.dp * config.train.micro_batches)


def _tokens(config: Config) -> int:
    """b*T/cp."""
    return _sequences(config) * config.model.seq_length // config.layout.cp


def _heads(config: Config) -> int:
    """Heads of which a device has all, or a part."""
    model, layout = config.model, config.layout
    if layout.has_grid and layout.attention2d == "blocks":
        return model.num_heads
    return inside(config) // model.head_size // (layout.tp * layout.col)


def _padded(config: Config, size: int) -> int:
    layout: Layout = config.layout
    if not layout.has_grid:
        return size
    return padded(size, (layout.row, layout.col, layout.matmul2d_slices))


def _wide(config: Config) -> int:
    """Bytes of a number in the precision of sums and masters."""
    return jnp.promote_types(config.model.dtype, jnp.float32).itemsize
