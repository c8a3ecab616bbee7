"""Predicts the collectives of layers, as sums over their parts, and those before and behind them.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model, V vocabulary,
M micro-batches; all as padded.
"""

from collections.abc import Iterator

from jaxptd.costs.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from jaxptd.layout import Axis
from jaxptd.parts.architecture import Architecture, Stack
from jaxptd.parts.grid import norms, product
from jaxptd.parts.scenario import RECOMPUTED, WHOLE_PART, Recomputed, Scenario


def recomputed(step: Scenario, stack: Stack) -> list[tuple[Recomputed, int]]:
    """Layers of a stack that are alike: (what backward repeats, number of layers)."""
    if step.plan and step.plan.recompute:
        return [(WHOLE_PART, stack.layers)]
    counts = step.plan.stacks[stack.name] if step.plan else (stack.layers,)
    remats = (each for count in counts for each in step.config.model.remats(count))
    rows = [(step.gathering(RECOMPUTED[remat]), layers) for remat, layers in remats]
    if not stack.norms_sums:
        return rows
    # The last sum enters a norm of the same layer.
    return [(again._replace(last_product=again.products), n) for again, n in rows]


def inside_layers(step: Scenario, stack: Stack) -> Iterator[Collective]:
    """Collectives of a stack over tp, or on a grid; step: of any sequences."""
    step = step.with_tokens(stack.tokens, stack.hidden)
    products = _on_grid if step.config.layout.has_grid else _on_tp
    for again, layers in recomputed(step, stack):
        yield from products(step, stack, again, step.micro_batches * layers)


def along_cp(step: Scenario, stack: Stack) -> Iterator[Collective]:
    """Collectives of a stack along cp and its ring; step: of any sequences."""
    step = step.with_tokens(stack.tokens, stack.hidden)
    for again, layers in recomputed(step, stack):
        for part in stack.parts:
            yield from part.along_cp(step, again, step.micro_batches * layers)


def at_ends(step: Scenario, architecture: Architecture) -> Iterator[Collective]:
    """Collectives of tables, heads, the loss, and of all else outside of layers."""
    ends = _ends_on_grid if step.config.layout.has_grid else _ends_on_tp
    yield from ends(step, architecture)
    if architecture.outside:
        yield from architecture.outside.collectives(step, architecture.stacks)


def _embeddings(step: Scenario, architecture: Architecture) -> int:
    """Forward passes of a micro-batch's embedding.

    A pipeline differentiates it at a tick of its own, and a norm there needs its input again.
    """
    return 2 if step.plan and architecture.first_norm else 1


# ---- on a row x col grid -------------------------------------------------------------------------


def _on_grid(step: Scenario, stack: Stack, again: Recomputed, times: int) -> Iterator[Collective]:
    """Layers of a stack with the same recomputation; times: layers in all micro-batches."""
    sizes, forwards = step.sizes, 1 + again.products
    for number, part in enumerate(stack.parts):
        first, second = part.first(sizes), part.second(sizes)
        runs = forwards if number < stack.read_inside else 1 + again.last_product
        yield from product(step, sizes.hidden, first, forwards=forwards, times=times)
        yield from product(step, second, sizes.hidden, forwards=runs, times=times)
        yield from part.on_grid(step, again, times)
    all_norms = times * stack.norms
    yield from norms(step, stack.statistics, forwards=forwards, times=all_norms)


def _ends_on_grid(step: Scenario, architecture: Architecture) -> Iterator[Collective]:
    """Tables, the norms and products outside of layers, and the loss."""
    sizes, M = step.sizes, step.micro_batches
    for head in architecture.heads:
        columns = head.padded_columns(sizes)
        yield from product(step, sizes.hidden, columns, forwards=1, times=M)
        yield from product(step, sizes.hidden, sizes.hidden, forwards=1, times=M * head.squares)
    first = [(architecture.first_norm, _embeddings(step, architecture))]
    for norm, forwards in first + [(head.norm, 1) for head in architecture.heads]:
        if norm:
            yield from norms(step, norm, forwards=forwards, times=M)
    yield from _tables(step, architecture)


def _tables(step: Scenario, architecture: Architecture) -> Iterator[Collective]:
    """Rows of both tables, m*D and T/cp*D/col, forward and back; the loss of V sharded over col."""
    config, layout, sizes = step.config, step.config.layout, step.sizes
    length = config.padded_model.seq_length // layout.cp
    positions = length * sizes.hidden // layout.col * sizes.itemsize
    forwards = _embeddings(step, architecture)
    for length in architecture.embedded:
        yield from _look_ups(step.with_tokens(length), forwards)
    for kind, passes in ((REDUCE_SCATTER, forwards), (ALL_GATHER, 1)):
        times = passes * step.micro_batches * (architecture.positions is not None)
        yield Collective(kind, (Axis.ROW,), times, times * positions)
    times = len(architecture.heads) * step.micro_batches
    loss = 3 * times * sizes.rows * sizes.master_itemsize
    yield Collective(ALL_REDUCE, (Axis.COL,), 2 * times, loss)


def _look_ups(step: Scenario, forwards: int) -> Iterator[Collective]:
    """Rows of the table of tokens for one sequence."""
    sizes, times = step.sizes, step.micro_batches
    rows = times * sizes.rows * sizes.hidden * sizes.itemsize
    yield Collective(ALL_TO_ALL, (Axis.ROW,), (1 + forwards) * times, (1 + forwards) * rows)
    yield Collective(REDUCE_SCATTER, (Axis.COL,), forwards * times, forwards * rows)
    yield Collective(ALL_GATHER, (Axis.COL,), times, rows)


# ---- on tp, with and without sequence parallelism ------------------------------------------------
# Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.

# Collectives of each kind of a pair of products: forward, and its conjugate backward.
FORWARD, BACKWARD = 1, 1
# Rounds of a pair with collective matmul: a gather and a scatter forward, their conjugates
# backward, and the gather of x once more, for the gradient of the weights.
ROUNDS = 2 * (FORWARD + BACKWARD) + 1


def _on_tp(step: Scenario, stack: Stack, again: Recomputed, times: int) -> Iterator[Collective]:
    """Activations of b*T/cp*D at every collective; times: layers in all micro-batches."""
    products = _in_rounds if step.config.layout.collective_matmul else _around_products
    yield from products(step, stack, again, times)
    for part in stack.parts:
        yield from part.on_tp(step, again, times)


def _ends_on_tp(step: Scenario, architecture: Architecture) -> Iterator[Collective]:
    """Embeddings and output layers; then the loss of the sharded vocabulary.

    The loss takes a maximum and two sums for each token.
    """
    for length in architecture.embedded:
        scattered = _embeddings(step, architecture)
        yield from _at_an_end(step.with_tokens(length), scattered=scattered)
    for _ in architecture.heads:
        yield from _at_an_end(step, scattered=1)
    times = len(architecture.heads) * step.micro_batches
    loss = 3 * times * step.sizes.tokens * step.sizes.master_itemsize
    yield Collective(ALL_REDUCE, (Axis.TP,), 2 * times, loss)


def _kinds(step: Scenario) -> tuple[str, ...]:
    """Collectives that move activations: one, or with sequence parallelism its two halves."""
    return (ALL_GATHER, REDUCE_SCATTER) if step.config.layout.sequence_parallel else (ALL_REDUCE,)


def _size(step: Scenario) -> int:
    """Bytes of the activations of all a micro-batch's tokens on a device, b*T/cp*D."""
    return step.sizes.tokens * step.sizes.hidden * step.sizes.itemsize


def _at_an_end(step: Scenario, *, scattered: int) -> Iterator[Collective]:
    """The embedding of a sequence, or an output layer; scattered: times of the sums."""
    for kind in _kinds(step):
        times = step.micro_batches * (1 if kind == ALL_GATHER else scattered)
        yield Collective(kind, (Axis.TP,), times, times * _size(step))


def _around_products(
    step: Scenario, stack: Stack, again: Recomputed, times: int
) -> Iterator[Collective]:
    """Before and behind the pairs of products; times: layers in all micro-batches."""
    parts = len(stack.parts)
    once, scattered = parts * (FORWARD + BACKWARD), again.row_products(parts, stack.read_inside)
    gathered = parts * again.inputs
    for kind in _kinds(step):
        count = times * (once + (gathered if kind == ALL_GATHER else scattered))
        yield Collective(kind, (Axis.TP,), count, count * _size(step))


def _in_rounds(step: Scenario, stack: Stack, again: Recomputed, times: int) -> Iterator[Collective]:
    """Rounds of tp-1 hops, with collective matmul; times: layers in all micro-batches.

    Products gather in the same rounds, so the gathers run again only with the products. Where
    backward is split, the gradient of a pair's result passes in both halves.
    """
    parts, tp = len(stack.parts), step.config.layout.tp
    splits = step.plan is not None and step.plan.schedule.splits
    rounds = parts * (ROUNDS + again.products + splits) + again.row_products(
        parts, stack.read_inside
    )
    hops = times * rounds * (tp - 1)
    yield Collective(PERMUTE, (Axis.TP,), hops, hops * _size(step) // tp)
