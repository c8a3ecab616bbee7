"""A best-first search for the fastest layouts, which proves that none is better.

Items wait in a heap ordered by a lower bound of their time: first shapes by the time of their
matmuls alone, then each with its schedule and ZeRO stage, then with its communication, and last
with the exact prediction. An item that leaves the heap with an exact time is better than all that
remain.
"""

import contextlib
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxptd.analysis import memory_model
from jaxptd.config import Config, Remat
from jaxptd.costs.program import Implementation
from jaxptd.costs.terms import total
from jaxptd.errors import UserError
from jaxptd.hardware import Cluster
from jaxptd.layout import Layout
from jaxptd.planner.cost import StepDescription, StepTime
from jaxptd.planner.cost.layer import LayerTerms, first_terms, last_terms, layer_terms
from jaxptd.planner.cost.step import message_terms
from jaxptd.planner.search.bounds import Bound, Bounds, LayerCost
from jaxptd.planner.search.space import (
    REMATS,
    Choice,
    LayerLayout,
    MeshShape,
    ScheduleChoice,
    Space,
)
from jaxptd.planner.steps.implementation import ADDED, STACKED, implementation_of
from jaxptd.planner.steps.step import ConfigStep, Memory, Predictor, memory_of
from jaxptd.planner.steps.traffic import NAMES, Compiled

# ---- the costs of layers: computed once for each, and scaled where that is exact ----------------


class Fixed(NamedTuple):
    """A layout's bytes saved per sequence, and its state, as in `LayerCost`.

    descriptions: of the layout, and of others that may have fewer FLOPs.
    """

    config: Config
    descriptions: tuple[StepDescription, ...]
    kept: Mapping[Remat, float]
    state: float
    gradients: float
    matrices: float
    experts: float


class LayerCosts:
    """The costs of the layer layouts of a space on a cluster.

    Args:
        space: of the layouts.
        cluster: the devices.
        imbalance: as in `Parallelism`; bounds assume balanced experts.
    """

    def __init__(self, space: Space, cluster: Cluster, imbalance: float = 1.0) -> None:
        self.space, self.cluster = space, cluster
        self.predict = Predictor(cluster, imbalance=imbalance)
        self.bare = functools.cache(self._bare)
        self.whole = functools.cache(self._whole)
        self._fixed_of = functools.cache(self._fixed)

    def _fixed(self, layout: Layout) -> Fixed | None:
        """None if the layout does not divide the model."""
        config = self.space.layer_config(LayerLayout(layout, 1))
        if config is None:
            return None
        step, stacks = ConfigStep(config), self.space.stacks
        all_ways = [dataclasses.replace(config, layout=each) for each in self._latents((layout,))]
        kept = {
            remat: min(
                float(sum(s.layers * memory_model.layer(each, s, remat) for s in stacks))
                for each in all_ways
            )
            for remat in REMATS
        }
        description, *others = (ConfigStep(each).description(self.cluster) for each in all_ways)
        others = [each for each in others if each.parallelism.absorbed]
        state = step.state["parameters"] + step.state["optimizer"]
        matrices = sum(stack.layers * description.layer_parameters(stack) for stack in stacks)
        experts = sum(stack.layers * stack.expert_weights for stack in stacks)
        sizes = step.state["gradients"], 4 * matrices, 4 * experts / layout.expert_shards
        return Fixed(config, (description, *others), kept, state, *sizes)

    def exchanges(self, layout: Layout) -> tuple[Layout, ...]:
        """The layout, and the same with other ways to share sequences, where one may be faster.

        Within a node, and with one member in each, a ring's hops take no longer than gathering, and
        attention hides them. Otherwise a hop uses one network card of a node. Gathering uses those
        of all members, and so do rings of one member in each node, between which Ulysses splits the
        heads. A plan may ask for either all the same. Latent vectors are fewer bytes than keys and
        values, but each device expands them; where attention hides the bytes, that is slower. With
        absorbed products none expands them, but scores have more FLOPs.
        """
        return self._latents((layout, *self._between_nodes(layout)))

    def _latents(self, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """The layouts, and those of latent attention that expand before they exchange, or never."""
        pins = self.space.pins
        if not self.space.config.model.latent or "layout.latent_exchange" in pins:
            return layouts
        latents = (each for each in layouts if each.exchanges_latents)
        others = [dataclasses.replace(each, latent_exchange="expanded") for each in latents]
        if "layout.latent_products" not in pins:
            others += [dataclasses.replace(each, latent_products="absorbed") for each in layouts]
        return (*layouts, *others)

    def _between_nodes(self, layout: Layout) -> Iterator[Layout]:
        """Other ways to share sequences over several nodes."""
        members, near = layout.cp * layout.row, self.cluster.node_size // (layout.tp * layout.col)
        blocks = layout.has_grid and layout.attention2d == "blocks"
        if not 1 < near < members or blocks:
            return
        pins, others = self.space.pins, list[dict[str, Any]]()
        if "layout.ring" not in pins:
            others.append({"ring": "gather"})
        if not {"layout.cp", "layout.ulysses"} & {*pins} and not layout.has_grid:
            others += [{"cp": members // n, "ulysses": n} for n in (near, members)]
        for fields in others:
            with contextlib.suppress(UserError):
                yield dataclasses.replace(layout, **fields)

    def _seconds(self, config: Config, implementation: Implementation) -> Callable[[Remat], float]:
        """Seconds of all layers for a micro-batch, by what they recompute."""

        def seconds(remat: Remat) -> float:
            passes, _ = self.predict.unit(config, implementation, remat)
            return sum(s.layers * passes[s.name, remat].seconds for s in self.space.stacks)

        return seconds

    def _bare(self, layer_layout: LayerLayout, many: bool) -> LayerCost | None:
        """The cost without collectives and copies; None if the layout does not divide the model."""
        fixed = self._fixed_of(layer_layout.layout)
        if fixed is None:
            return None
        descriptions = [self._described(each, layer_layout, many) for each in fixed.descriptions]
        description, stacks = descriptions[0], self.space.stacks
        ways = [[(s.layers, layer_terms(each, s)) for s in stacks] for each in descriptions]

        def seconds(remat: Remat) -> float:
            return min(sum(n * _seconds(each, remat) for n, each in terms) for terms in ways)

        last = min(total(last_terms(each)) for each in descriptions)
        ends = total(first_terms(description)) + last
        hop = 2 * total(
            message_terms(description, inside=self.space.gpus <= self.cluster.node_size)
        )
        kept = {remat: layer_layout.micro_batch * size for remat, size in fixed.kept.items()}
        sizes = fixed.state, fixed.gradients, fixed.matrices, fixed.experts
        number = self.space.layers
        return LayerCost(functools.cache(seconds), ends, last, hop, number, kept, *sizes)

    def _described(
        self, description: StepDescription, layer_layout: LayerLayout, many: bool
    ) -> StepDescription:
        """A layer's step with the fewest FLOPs of layouts that differ in what they exchange."""
        parallelism = dataclasses.replace(
            description.parallelism,
            latents=False,
            remat="none",
            remat_layers=None,
            micro_batch=layer_layout.micro_batch,
            global_batch=layer_layout.sequences,
        )
        implementation = _implementation(description.implementation, many=many)
        return dataclasses.replace(
            description, parallelism=parallelism, implementation=implementation
        )

    def _whole(self, layer_layout: LayerLayout, many: bool, stages: bool) -> LayerCost | None:
        """The cost with the collectives and copies of layers.

        Args:
            layer_layout: the layout's.
            many: whether a step has several micro-batches.
            stages: whether it has several stages.
        """
        bare = self.bare(layer_layout, many)
        fixed = self._fixed_of(layer_layout.layout)
        if bare is None or fixed is None:
            return None
        layouts = self.exchanges(layer_layout.layout)
        layers = [dataclasses.replace(layer_layout, layout=layout) for layout in layouts]
        configs = [config for each in layers if (config := self.space.layer_config(each))]
        records = [
            _implementation(
                implementation_of(config, self.cluster.accelerator), many=many, stages=stages
            )
            for config in configs
        ]
        each = [self._seconds(*both) for both in zip(configs, records, strict=True)]

        def seconds(remat: Remat) -> float:
            return min(of_exchange(remat) for of_exchange in each)

        ends = [self.predict.unit(*both, "none")[1] for both in zip(configs, records, strict=True)]
        last = min(total(each.last) for each in ends)
        end_seconds = total(ends[0].first) + last
        return dataclasses.replace(
            bare, layers=functools.cache(seconds), ends=end_seconds, last=last
        )


def _implementation(record: Implementation, *, many: bool, stages: bool = False) -> Implementation:
    """A program's record without casts, which depend on the ZeRO stage."""
    return dataclasses.replace(
        record,
        cast=0,
        accumulate=ADDED if many else 0,
        stacked=STACKED if stages else record.stacked,
    )


def _seconds(terms: LayerTerms, remat: str) -> float:
    return total(terms.forward) + total(terms.backward(remat))


def _waits_for_layers(step: StepTime) -> bool:
    """True if part of ZeRO's collectives of layers is exposed.

    Recomputing then takes time in which they run, and may make a step no longer.
    """
    return any(term.name.startswith(NAMES["zero"]) and term.seconds for term in step.terms)


# ---- the search ----------------------------------------------------------------------------------

WHOLE = "whole"  # shapes whose bounds include what layers send


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout that fits in memory.

    Args:
        config: the config with this layout.
        mesh_shape: sizes of its axes.
        step: its predicted time.
        memory: its predicted bytes.
        compiled: the compiler's figures; None if it was not compiled.
    """

    config: Config
    mesh_shape: MeshShape
    step: StepTime
    memory: Memory
    compiled: Compiled | None = None

    @property
    def seconds(self) -> float:
        """Its predicted time, from the compiler's figures if available."""
        return self.compiled.step.seconds if self.compiled else self.step.seconds


class Search:
    """Finds the best layouts of a space.

    Args:
        space: the layouts.
        cluster: the devices.
        limit: bytes of a device that a step may use.
        imbalance: as in `Parallelism`.
    """

    def __init__(
        self, space: Space, cluster: Cluster, limit: float, imbalance: float = 1.0
    ) -> None:
        self.space, self.cluster, self.limit = space, cluster, limit
        self.layer_costs = LayerCosts(space, cluster, imbalance)
        self.counted = 0  # candidates whose time was predicted exactly

    def __iter__(self) -> Iterator[Candidate]:
        """Yields the fastest layout, then the fastest with other axis sizes, and so on."""
        order = itertools.count()
        heap: list[tuple[float, int, MeshShape, Any]] = []
        for mesh_shape in self.space.mesh_shapes():
            if cost := self.layer_costs.bare(mesh_shape.layer_layout, mesh_shape.micro_batches > 1):
                bounds = Bounds(cost, mesh_shape, self.space, self.cluster, self.limit)
                layers = cost.layers(bounds.quickest)
                seconds = mesh_shape.micro_batches * (layers + cost.ends) / mesh_shape.pp
                heapq.heappush(heap, (seconds, next(order), mesh_shape, None))
        done: set[tuple[int, ...]] = set()
        while heap:
            _, _, mesh_shape, what = heapq.heappop(heap)
            if mesh_shape.sizes in done:
                continue
            if isinstance(what, Candidate):
                done.add(mesh_shape.sizes)
                yield what
                continue
            for seconds, item in self._further(mesh_shape, what):
                heapq.heappush(heap, (seconds, next(order), mesh_shape, item))

    def _further(self, mesh_shape: MeshShape, what: Any) -> Iterator[tuple[float, Any]]:
        """Yields the items that an item of the heap represents."""
        first, *others = self.space.choices
        if what is None or what is WHOLE:
            items = list(self._least(mesh_shape, whole=what is WHOLE))
            if what is WHOLE:
                yield from items
            elif items:
                yield min(seconds for seconds, _ in items), WHOLE
        elif isinstance(what, ScheduleChoice):
            bounds = self._bounds(mesh_shape)
            fits = bounds and bounds.of(what, first)
            yield from self._items(bounds, what, [first, *self._quick(bounds)] if fits else others)
        elif candidate := self.evaluate(mesh_shape, *what):
            yield candidate.step.seconds, candidate
            if what[1].choice.remat == first.remat and _waits_for_layers(candidate.step):
                kept = [choice for choice in others if choice.offload == first.offload]
                yield from self._items(self._bounds(mesh_shape), what[0], kept)
        elif what[1].choice == first:
            yield from self._items(self._bounds(mesh_shape), what[0], others)

    def _quick(self, bounds: Bounds | None) -> list[Choice]:
        """Choices without offloading that may be faster than the first even where that fits."""
        first, *others = self.space.choices
        quickest = bounds and bounds.quickest
        return [c for c in others if c.remat == quickest and c.offload == first.offload]

    def _least(
        self, mesh_shape: MeshShape, *, whole: bool
    ) -> Iterator[tuple[float, ScheduleChoice]]:
        """Schedules and ZeRO stages that may fit, with their least seconds."""
        if bounds := self._bounds(mesh_shape, whole=whole):
            for pipe in self.space.pipes(mesh_shape, bounds.worth, self.cluster.node_size):
                seconds = bounds.least(pipe)
                if seconds is not None:
                    yield seconds, pipe

    def _items(
        self, bounds: Bounds | None, pipe: ScheduleChoice, choices: Sequence[Choice]
    ) -> Iterator[tuple[float, Any]]:
        for choice in choices:
            if bound := bounds and bounds.of(pipe, choice):
                yield bound.seconds, (pipe, bound)

    def _bounds(self, mesh_shape: MeshShape, *, whole: bool = True) -> Bounds | None:
        """The bounds of layouts with this mesh shape; whole: including what layers send."""
        many, layer_costs = mesh_shape.micro_batches > 1, self.layer_costs
        cost = (
            layer_costs.whole(mesh_shape.layer_layout, many, mesh_shape.pp > 1)
            if whole
            else layer_costs.bare(mesh_shape.layer_layout, many)
        )
        return Bounds(cost, mesh_shape, self.space, self.cluster, self.limit) if cost else None

    def evaluate(
        self, mesh_shape: MeshShape, pipe: ScheduleChoice, bound: Bound
    ) -> Candidate | None:
        """The candidate that recomputes as few layers as fit, or all; None if none fits."""
        self.counted += 1
        layer, candidates = mesh_shape.layer_layout, []
        for layout in self.layer_costs.exchanges(layer.layout):
            each = dataclasses.replace(layer, layout=layout)
            shape = dataclasses.replace(mesh_shape, layer_layout=each)
            with contextlib.suppress(UserError):  # of choices that do not go together
                for step, memory in self._fitting(shape, pipe, bound):
                    seconds = self.layer_costs.predict(step)
                    candidates.append(Candidate(step.config, mesh_shape, seconds, memory))
        return min(candidates, key=lambda each: each.step.seconds, default=None)

    def _fitting(
        self, mesh_shape: MeshShape, pipe: ScheduleChoice, bound: Bound
    ) -> list[tuple[ConfigStep, Memory]]:
        """The steps that recompute all layers, and as few as fit, with their memory."""
        whole = ConfigStep(self.space.config_of(mesh_shape, pipe, bound.choice))
        every = fitting = whole, memory_of(whole)
        if fitting[1].total > self.limit:
            return []
        if bound.choice.remat == "none" or "model.remat_layers" in self.space.pins:
            return [fitting]
        high = self.space.cut(mesh_shape, pipe).depth
        low = max(1, int(bound.share * high))
        middle = low  # the bound is often what fits
        while low < high:  # recomputing fewer layers needs more memory
            step = ConfigStep(self.space.config_of(mesh_shape, pipe, bound.choice, middle))
            memory = memory_of(step)
            if memory.total <= self.limit:
                fitting, high = (step, memory), middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return [fitting, every]
