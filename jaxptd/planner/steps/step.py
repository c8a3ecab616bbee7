"""Predicts time and memory of a config's step."""

import dataclasses
import functools
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from jaxptd.analysis import memory_model
from jaxptd.analysis.peak import outside, peak
from jaxptd.config import Config, Remat
from jaxptd.costs import kernels
from jaxptd.costs.program import Implementation, Parallelism
from jaxptd.costs.terms import Term
from jaxptd.hardware import Cluster
from jaxptd.layout import Layout
from jaxptd.models.families import architecture_of
from jaxptd.models.stages import parameter_infos
from jaxptd.pipeline.placement import Stages
from jaxptd.planner.cost import Placed, StepDescription, StepTime
from jaxptd.planner.cost.collectives import BESIDE, exposed_terms
from jaxptd.planner.cost.step import (
    EndTerms,
    Kind,
    LayerPasses,
    by_place,
    end_terms,
    layer_passes,
    put_together,
)
from jaxptd.planner.steps.implementation import (
    STACKED,
    TAKEN,
    copied,
    implementation_of,
    layers_by_stage,
    outline,
)
from jaxptd.planner.steps.traffic import layer_collectives, step_collectives
from jaxptd.shapes import ParamShape
from jaxptd.zero.plan import StateShapes, layers_plan


@dataclasses.dataclass(frozen=True)
class ConfigStep:
    """A config's step, and what follows from the config alone.

    Raises:
        UserError: on access to a pipeline that does not exist.
    """

    config: Config

    @cached_property
    def plan(self) -> Stages | None:
        """The pipeline's outline."""
        stacks = architecture_of(self.config.model).stacks
        return outline(self.config, {stack.name: stack.layers for stack in stacks})

    @property
    def _one_stage(self) -> dict[str, tuple[int, ...]]:
        """The layers of each stack, without a pipeline."""
        return {stack.name: (stack.layers,) for stack in architecture_of(self.config.model).stacks}

    @cached_property
    def infos(self) -> dict[str, ParamShape]:
        """Shapes of the parameters."""
        return parameter_infos(self.config)

    @cached_property
    def shapes(self) -> StateShapes:
        """Shapes of the state."""
        return StateShapes.of(self.config, self.infos)

    @cached_property
    def state(self) -> dict[str, int]:
        """Bytes of parameters, gradients, moments, and gathered parameters on a device."""
        return memory_model.state(self.config, self.shapes)

    def description(self, cluster: Cluster) -> StepDescription:
        """The step in the cost model's form.

        Raises:
            UserError: the cost model or the devices lack something that the config asks for.
        """
        plan, wide = self.plan, 4
        return StepDescription(
            architecture_of(self.config.model),
            spread_of(self.config, plan.schedule.chunks if plan else 1),
            implementation_of(self.config, cluster.accelerator),
            cluster,
            placed=layers_by_stage(plan) if plan else [self._one_stage],
            updated=self.state["parameters"] / wide,
        )


def spread_of(config: Config, chunks: int) -> Parallelism:
    """The layout of a config, with `chunks` parts of the model on a stage."""
    layout, train, model = config.layout, config.train, config.model
    return Parallelism(
        gpus=layout.num_devices,
        global_batch=train.global_batch_size,
        micro_batch=train.global_batch_size // (layout.sample_shards * train.micro_batches),
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ulysses=layout.ulysses,
        virtual_stages=chunks,
        zero=layers_plan(config).stage,
        replicas=layout.replicas,
        sequence_parallel=layout.sequence_parallel,
        remat=model.remat,
        remat_layers=model.recomputing,
        row=layout.row,
        col=layout.col,
        schedule=layout.schedule,
        ep=layout.ep,
        experts_over=layout.expert_devices,
        expert_tp=layout.expert_slices,
        latents=layout.exchanges_latents,
        absorbed=layout.absorbs_latents,
    )


MicroBatchTerms = tuple[
    dict[Kind, LayerPasses], EndTerms
]  # one layer of each stack and one micro-batch; the ends


LayerTraffic = tuple[list[Placed], dict[Kind, float]]  # collectives, and bytes that a layer saves


class _Sequences(NamedTuple):
    """The collectives and saved bytes of one sequence, and of two.

    A micro-batch sends parameters once, whatever its number of sequences, but activations of each.
    """

    one: LayerTraffic
    two: LayerTraffic

    def of(self, number: int) -> LayerTraffic:
        """The collectives, merged if alike, and saved bytes of `number` sequences."""

        def line(one: float, two: float) -> float:
            return one + (number - 1) * (two - one)

        counts: dict[tuple[Placed, float], float] = {}
        for a, b in zip(self.one[0], self.two[0], strict=True):
            alike = a._replace(count=0), line(a.bytes, b.bytes)
            counts[alike] = counts.get(alike, 0) + a.count
        placed = [a._replace(bytes=n, count=count) for (a, n), count in counts.items()]
        return placed, {kind: line(a, self.two[1][kind]) for kind, a in self.one[1].items()}


def sent_and_kept(config: Config, remat: Remat) -> LayerTraffic:
    """The collectives of one layer of each stack and of the ends, and the layer's saved bytes."""
    stacks = architecture_of(config.model).stacks
    kept = {(s.name, remat): float(memory_model.layer(config, s, remat)) for s in stacks}
    return list(layer_collectives(config, remat)), kept


class Predictor:
    """Predicts steps of one model on one cluster, and caches what layouts share.

    Args:
        cluster: the devices.
        hiding: whether layers' collectives overlap the work that can hide them.
        imbalance: as in `Parallelism`; all devices wait for the busiest.
    """

    def __init__(self, cluster: Cluster, *, hiding: bool = True, imbalance: float = 1.0) -> None:
        self.cluster, self._hiding, self._imbalance = cluster, hiding, imbalance
        self._units: dict[tuple[Any, ...], MicroBatchTerms] = {}
        self._micro_batches: dict[tuple[Layout, Remat], _Sequences] = {}

    def __call__(self, step: ConfigStep) -> StepTime:
        """The time of a step.

        Raises:
            UserError: the cost model lacks something that the config asks for.
        """
        description = step.description(self.cluster)
        kinds = {kind for stage in description.stages for kind in stage}
        layers: dict[Kind, LayerPasses] = {}
        ((first, _),) = step.config.model.remats(1)  # of layers that run with heads
        _, ends = self.unit(step.config, description.implementation, first)
        for remat in sorted({remat for _, remat in kinds}):
            passes, _ = self.unit(step.config, description.implementation, remat)
            layers |= {kind: each for kind, each in passes.items() if kind in kinds}
        places = by_place(step_collectives(step.config, step.infos, step.plan))
        for kind, layer in layers.items():
            sent = [each for each in places.get("layer", ()) if each.is_of(*kind)]
            beside = {"other layers": layer.hiding if self._hiding else 0.0}
            layers[kind] = layer.and_backward(exposed_terms(description, sent, beside))
        more: list[Term] = []
        offloaded = step.config.layout.offloaded
        if "activations" in offloaded:
            layers = dict(self._offloaded(step.config, *each) for each in layers.items())
        if "optimizer" in offloaded:
            state = step.state["parameters"] + step.state["optimizer"]
            more = [kernels.to_host(self.cluster.accelerator, 2.0 * state).named("state")]
        return put_together(description, layers, ends, places.get("step", ()), more)

    def _offloaded(
        self, config: Config, kind: Kind, passes: LayerPasses
    ) -> tuple[Kind, LayerPasses]:
        """A layer whose saved activations go to the host and return while it works."""
        stack = next(s for s in architecture_of(config.model).stacks if s.name == kind[0])
        if kind[1] == "none":
            return kind, passes
        moves = 2.0 * memory_model.layer(config, stack, "dots")
        term = kernels.to_host(self.cluster.accelerator, moves).named("kept activations")
        left = max(0.0, term.seconds - BESIDE * passes.seconds)
        return kind, passes.and_backward([term._replace(seconds=left)])

    def unit(self, config: Config, implementation: Implementation, remat: Remat) -> MicroBatchTerms:
        """Terms of one layer of each stack and one micro-batch, and of the ends.

        Args:
            config: any number of layers, stages, replicas and micro-batches.
            implementation: its kernels.
            remat: what the layers recompute.
        """
        layout, train = config.layout, config.train
        sequences = train.global_batch_size // (layout.sample_shards * train.micro_batches)
        key = alone(layout), sequences, implementation, remat
        if key not in self._units:
            self._units[key] = self._unit(config, *key)
        return self._units[key]

    def _unit(
        self,
        config: Config,
        layout: Layout,
        sequences: int,
        implementation: Implementation,
        remat: Remat,
    ) -> MicroBatchTerms:
        model = architecture_of(config.model)
        parallelism = dataclasses.replace(
            _spread_alone(layout),
            remat=remat,
            micro_batch=sequences,
            global_batch=sequences * layout.ep,
            imbalance=self._imbalance,
        )
        description = StepDescription(model, parallelism, implementation, self.cluster)
        placed, kept = self.micro_batch(config, layout, sequences, remat)
        places = by_place(placed)
        passes = dict(layer_passes(description, [*kept], places))
        times = copied(implementation, layout, sequences)
        for kind, size in kept.items():
            layer = [each for each in places.get("layer", ()) if each.is_of(*kind)]
            passes[kind] = self._with_copies(passes[kind], layer, times)
            if implementation.stacked:
                passes[kind] = self._in_a_loop(passes[kind], size)
        return passes, end_terms(description, places)

    def micro_batch(
        self, config: Config, layout: Layout, sequences: int, remat: Remat
    ) -> "LayerTraffic":
        """A layer's collectives and saved bytes, for a micro-batch of `sequences` sequences."""
        key = layout, remat
        if key not in self._micro_batches:
            both = (sent_and_kept(_one_micro_batch(config, layout, n), remat) for n in (1, 2))
            self._micro_batches[key] = _Sequences(*both)
        placed, kept = self._micro_batches[key].of(sequences)
        if not self._hiding:
            placed = [each._replace(under="nothing") for each in placed]
        return placed, kept

    def _with_copies(
        self, passes: LayerPasses, placed: Sequence[Placed], times: int
    ) -> LayerPasses:
        """Adds the copies of what their collectives move to the passes.

        What is gathered over ep alone arrives as whole blocks of a new leading dim.
        """
        copied = (each for each in placed if each.axes != ("ep",))
        moved = times * sum(each.count * each.bytes for each in copied)
        term = kernels.moved(self.cluster.accelerator, moved, 4).named("copies of what is sent")
        return passes.and_backward([term] if moved else [])

    def _in_a_loop(self, passes: LayerPasses, kept: float) -> LayerPasses:
        """Adds the copies of `kept` bytes to and from the array of all layers."""
        into, out = (
            kernels.moved(self.cluster.accelerator, times * kept, 4) for times in (STACKED, TAKEN)
        )
        return passes.and_forward([into.named("kept, to all layers")]).and_backward(
            [out.named("kept, from all layers")]
        )


def predict(config: Config, cluster: Cluster) -> StepTime:
    """Predicts the time of a config's step on a cluster.

    Raises:
        UserError: the cost model lacks something that the config asks for, or its pipeline does not
            exist.
    """
    return Predictor(cluster)(ConfigStep(config))


@functools.lru_cache(4096)
def alone(layout: Layout) -> Layout:
    """The axes of a layout that share a layer, and their algorithms."""
    return dataclasses.replace(
        layout,
        pp=1,
        dp=1,
        replicas=1,
        zero=0,
        offload="none",
        update_on="device",
        schedule=Layout.schedule,
        virtual_stages=None,
        stage_layers=None,
    )


@functools.lru_cache(4096)
def _spread_alone(layout: Layout) -> Parallelism:
    return Parallelism(
        gpus=layout.num_devices,
        global_batch=1,
        tp=layout.tp,
        cp=layout.cp,
        ulysses=layout.ulysses,
        sequence_parallel=layout.sequence_parallel,
        row=layout.row,
        col=layout.col,
        ep=layout.ep,
        experts_over=layout.expert_devices,
        expert_tp=layout.expert_slices,
        latents=layout.exchanges_latents,
        absorbed=layout.absorbs_latents,
    )


def _one_micro_batch(config: Config, layout: Layout, sequences: int) -> Config:
    """The config of one micro-batch without recomputation."""
    model = dataclasses.replace(config.model, remat="none", remat_layers=None)
    batch = sequences * layout.sample_shards
    train = dataclasses.replace(config.train, global_batch_size=batch, micro_batches=1)
    return dataclasses.replace(config, model=model, layout=layout, train=train)


# ---- the memory of a config's step on each GPU ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on a device by kind: those of a step, and those outside it."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def memory_of(step: ConfigStep) -> Memory:
    """Predicts the bytes that a step needs on each GPU."""
    predicted = peak(step.config, step.state, step.plan)
    others = {each.name: each.bytes for each in outside(step.config.layout)}
    return Memory({name: size for name, size in predicted.parts.items() if size} | others)
