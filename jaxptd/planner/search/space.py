"""The space of layouts: every choice that divides the devices, the batch and the model.

A `LayerLayout` is all that one micro-batch of one layer depends on: tp, sequence parallelism, grid,
cp, ep, and sequences per micro-batch. A `MeshShape` adds numbers of stages and replicas, a
`ScheduleChoice` a schedule and a ZeRO stage, a `Choice` offloading and recomputation.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, get_args

from jaxptd.config import Config, ModelConfig, Remat, TrainConfig
from jaxptd.config.effects import without_effect
from jaxptd.errors import UserError, did_you_mean, quoted
from jaxptd.fields.values import ImpossibleError, OtherTypeError, convert, describe
from jaxptd.layout import SCHEDULES, SQUARE, Layout, Offload, ReplicaState, ZeroStage
from jaxptd.models.families import architecture_of, require_times
from jaxptd.pipeline.placement import part_sizes
from jaxptd.pipeline.schedules import outline

# ---- layers on the stages of a pipeline: in equal parts, or with fewer next to the loss ----------
# The last part also computes the loss. If that takes longer than a layer, the pipeline is faster
# when the last part hands layers over to the others. The first part's extra work is only the
# embedding, which takes less than a layer, so it gets an equal share.


class StageSplit(NamedTuple):
    """A split of a model's layers over stages.

    sizes: layers of each part of the model, in order; None: as the pipeline divides them.
    first, last: least shares of all layers on the first stage, and on the stage with the loss.
    most: least share of the stage with the most layers.
    depth: layers of the largest part.
    """

    sizes: tuple[int, ...] | None
    first: float
    last: float
    most: float
    depth: int


@functools.lru_cache(65536)
def cut(
    layers: int,
    stages: int,
    schedule: str,
    chunks: int | None,
    fewer: int = 0,
    sizes: tuple[int, ...] | None = None,
) -> StageSplit:
    """Splits the layers of one stack over the stages of a schedule.

    Args:
        layers: number of layers in the stack.
        stages: number of pipeline stages.
        schedule: its name.
        chunks: per stage, where the schedule leaves a choice.
        fewer: how many layers fewer than an equal share the last part gets.
        sizes: layers of each part, to use instead.

    Raises:
        UserError: there is no such pipeline.
    """
    parts = outline(schedule, stages=stages, micro_batches=stages, virtual_stages=chunks)
    asked = sizes is not None or fewer > 0
    *others, last = part_sizes(layers + fewer, parts.parts, sizes)
    counts = (*others, last - fewer)
    if counts[-1] < 0 or (fewer and counts == part_sizes(layers, parts.parts)):
        raise UserError(f"the last of {parts.parts} parts cannot give up {fewer} layers")
    of_stage = [0] * stages
    for part, size in enumerate(counts):
        of_stage[parts.where(part)[0]] += size
    loss = parts.where(parts.parts - 1)[0]
    ends = of_stage[0] / layers, of_stage[loss] / layers
    return StageSplit(counts if asked else None, *ends, max(of_stage) / layers, max(counts))


class StageSplits:
    """The ways to divide the layers of a model among stages.

    Args:
        stacks: layers of each stack.
        sizes: layers of each part of the model, if given.
    """

    def __init__(self, stacks: Sequence[int], sizes: tuple[int, ...] | None) -> None:
        self._stacks, self._sizes = stacks, sizes

    def of(self, stages: int, schedule: str, chunks: int | None, fewer: int) -> StageSplit:
        """The layers of each part.

        Raises:
            UserError: there is no such pipeline.
        """
        if self._follow(schedule):
            return cut(sum(self._stacks), stages, schedule, chunks, fewer, self._sizes)
        number, parts = sum(self._stacks), stages * (chunks or 1)
        fewest = number // parts * (chunks or 1) / number if self._sizes is None else 0.0
        depth = -(-number // parts) if stages > 1 else max(self._stacks)
        return StageSplit(self._sizes, 1 / stages, fewest, fewest, depth)

    def fewer(self, stages: int, schedule: str, chunks: int | None, most: int) -> Sequence[int]:
        """Numbers of layers that the last part can give up from an equal share."""
        equal = stages == 1 or self._sizes is not None or not self._follow(schedule)
        numbers = []
        for fewer in range(1 if equal else most + 1):
            with contextlib.suppress(UserError):
                self.of(stages, schedule, chunks, fewer)
                numbers.append(fewer)
        return numbers

    def _follow(self, schedule: str) -> bool:
        """True if the parts follow from counts: one stack, and a named schedule.

        With several stacks, or a schedule from a file, only the averages are known.
        """
        return len(self._stacks) == 1 and schedule in SCHEDULES


# ---- fields of a config that a plan can fix ------------------------------------------------------

Pins = Mapping[str, Any]  # field, such as "layout.tp" -> the only value to try
SECTIONS: Mapping[str, Any] = {"layout": Layout, "model": ModelConfig, "train": TrainConfig}
PINNED = (
    *("layout.tp", "layout.row", "layout.col", "layout.cp", "layout.ulysses", "layout.ep"),
    *("layout.pp", "layout.dp", "layout.replicas", "layout.replica_state"),
    *("layout.sequence_parallel", "layout.collective_matmul", "layout.keep_gathered"),
    *("layout.attention2d", "layout.matmul2d", "layout.matmul2d_slices", "layout.ring"),
    *("layout.latent_exchange", "layout.latent_products"),
    *("layout.schedule", "layout.virtual_stages", "layout.stage_layers", "layout.zero"),
    *("layout.offload", "model.remat", "model.remat_layers", "train.micro_batches"),
)


# Fields that one layer depends on.
OF_A_LAYER = (
    *("sequence_parallel", "collective_matmul", "keep_gathered"),
    *("attention2d", "matmul2d", "matmul2d_slices", "ring"),
    *("latent_exchange", "latent_products"),
)


def satisfies_pins(pins: Pins, model: ModelConfig, layout: Layout) -> bool:
    """True if a layer's layout has the pinned values, and each takes effect."""
    pinned = [name for name in OF_A_LAYER if f"layout.{name}" in pins]
    if not pinned:
        return True
    kept = dataclasses.replace(model, remat="none", remat_layers=None)
    ineffective = {sentence.partition("=")[0] for sentence in without_effect(kept, layout)}
    return all(
        getattr(layout, name) == pins[f"layout.{name}"] and f"layout.{name}" not in ineffective
        for name in pinned
    )


def checked_pins(pins: Pins, config: Config) -> dict[str, Any]:
    """Converts pins to their fields' types.

    Raises:
        UserError: a field cannot be pinned or has no such value, or pins contradict each other.
    """
    values = {}
    for name, value in pins.items():
        if name not in PINNED:
            remedy = did_you_mean(name, PINNED, otherwise=f"use one of {', '.join(PINNED)}")
            raise UserError(f"`plan` cannot fix the field {quoted(name)}; {remedy}")
        section, _, field = name.partition(".")
        kind = next(f.type for f in dataclasses.fields(SECTIONS[section]) if f.name == field)
        try:
            values[name] = convert(value, kind)
        except (OtherTypeError, ImpossibleError) as error:
            words = f"expected {describe(kind)}, got {quoted(str(value))}"
            raise UserError(f"{name}: {words}") from error
        if name == "layout.offload" and isinstance(values[name], tuple):
            raise UserError(f"{name}: `plan` offloads one thing at most; name one, or none")
        if name == "layout.offload" and values[name] == "parameters":
            raise UserError(
                f"`plan` does not cover {name}=parameters; use none, optimizer or activations"
            )
    _check_together(values, config)
    return values


def _check_together(pins: Pins, config: Config) -> None:
    """Raises UserError for pins that no layout satisfies, given what the search adds to them."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, value in pins.items():
        section, _, field = name.partition(".")
        sections[section][field] = value
    layout = sections["layout"]
    if layout.get("collective_matmul"):
        layout.setdefault("sequence_parallel", True)
    if layout.get("matmul2d") in SQUARE:
        side = layout.get("row", layout.get("col", 1))
        layout |= {"row": side, "col": side} | layout
    Layout(**layout)
    dataclasses.replace(config.model, **sections["model"])
    dataclasses.replace(config.train, **sections["train"])


# ---- the space of layouts ------------------------------------------------------------------------

WIDEST = 64  # most devices that share a matrix, or a sequence
CHUNKS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)  # per stage of interleaved
SHORTEST = 256  # fewest tokens of a sequence on a device of a ring
LARGEST = 64  # most sequences in a micro-batch
MOST_FEWER = 8  # most layers that a pipeline's last part gives up from an equal share
LONGEST_SPLIT = 16  # most stages of a schedule that splits backward


@dataclasses.dataclass(frozen=True)
class LayerLayout:
    """The choices that affect one layer and one micro-batch.

    Args:
        layout: sets the axes that share a layer; dp and pp are 1.
        micro_batch: sequences of a micro-batch.
    """

    layout: Layout
    micro_batch: int

    @property
    def devices(self) -> int:
        return self.layout.num_devices

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch on all of these devices; each along ep has its own."""
        return self.micro_batch * self.layout.sample_shards


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """A layer's layout extended to all devices.

    Args:
        layer_layout: that of a layer on one stage.
        pp, dp: sizes of the other axes; replicas that ZeRO leaves apart are part of this dp.
        micro_batches: per step.
    """

    layer_layout: LayerLayout
    pp: int
    dp: int
    micro_batches: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes; a ranking shows one layout for each."""
        layout = self.layer_layout.layout
        own = layout.tp, layout.row, layout.col, layout.sequence_shards, layout.ep
        return *own, self.pp, self.dp

    @property
    def shards(self) -> int:
        """Devices that split a batch's tokens, which ZeRO shards the state over."""
        return self.dp * self.layer_layout.layout.batch_shards


@dataclasses.dataclass(frozen=True)
class ScheduleChoice:
    """The schedule of the pipeline, and the ZeRO stage.

    Args:
        schedule, virtual_stages, zero, replicas, replica_state: as in a layout.
        fewer: how many layers fewer than an equal share the last part gets; see `cut`.
    """

    schedule: str = "1f1b"
    virtual_stages: int | None = None
    zero: ZeroStage = 0
    fewer: int = 0
    replicas: int = 1
    replica_state: ReplicaState = "copied"


class Choice(NamedTuple):
    """The place of the state or activations, and what backward recomputes."""

    offload: Offload = "none"
    remat: Remat = "none"


REMATS: tuple[Remat, ...] = ("none", "attention", "dots", "full")
CHOICES = (  # the first is the fastest; offloaded activations are those that dots saves
    *(Choice("none", remat) for remat in REMATS),
    *(Choice("optimizer", remat) for remat in REMATS),
    Choice("activations", "dots"),
)


class Space:
    """All choices for a config on a number of devices.

    Args:
        config: the run's; its layout, remat and micro-batches are ignored.
        gpus: number of devices.
        pins: fields that are fixed to one value.
    """

    def __init__(self, config: Config, gpus: int, pins: Pins) -> None:
        require_times(config.model)
        self.config, self.gpus, self.pins = config, gpus, pins
        self.stacks = architecture_of(config.model).stacks
        self.layers = sum(stack.layers for stack in self.stacks)
        given = pins.get("layout.stage_layers")
        given = given and config.model.in_periods(given)
        self._cuts = StageSplits([s.layers for s in self.stacks], given)

    def mesh_shapes(self) -> Iterator[MeshShape]:
        """Every layer layout on every number of stages that divides the devices."""
        batch = self.config.train.global_batch_size
        for layout in self._layouts() if self.choices else ():
            others = self.gpus // layout.num_devices
            for pp in self._pinned("layout.pp", _divisors(others)):
                dp = others // pp
                replicas = dp * layout.ep
                if others % pp or pp > self.layers or dp % self._copies(dp):
                    continue
                if batch % replicas or self._other("layout.dp", dp // self._copies(dp)):
                    continue
                for micro_batch in _divisors(batch // replicas, LARGEST):
                    m = batch // replicas // micro_batch
                    if not self._other("train.micro_batches", m):
                        yield MeshShape(LayerLayout(layout, micro_batch), pp, dp, m)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """Choices that pins allow, fastest first."""
        return tuple(
            each
            for each in CHOICES
            if not self._other("layout.offload", each.offload)
            and not self._other("model.remat", each.remat)
            and (each.remat != "none" or self.pins.get("model.remat_layers") is None)
        )

    @cached_property
    def hosts_state(self) -> bool:
        """True if a choice after the first puts the state in host memory."""
        return any(choice.offload == "optimizer" for choice in self.choices[1:])

    def _copies(self, dp: int) -> int:
        """`layout.replicas` by the pins; 1 if they leave it open. dp: with all replicas."""
        if "layout.replicas" in self.pins:
            return int(self.pins["layout.replicas"])
        pinned = self.pins.get("layout.dp", dp)
        return dp // pinned if dp % pinned == 0 else 1

    def sharding(
        self, mesh_shape: MeshShape, near: int
    ) -> Iterator[tuple[ZeroStage, int, ReplicaState]]:
        """ZeRO stages, each over all devices that split a batch, or in groups of `near` devices.

        Groups, which are replicas, have copies of the state or split it.
        """
        zeros = self._pinned("layout.zero", (0, 1, 2, 3) if mesh_shape.shards > 1 else (0,))
        dp, layout = mesh_shape.dp, mesh_shape.layer_layout.layout
        inside, left = divmod(near, layout.num_devices)  # of dp, in a node
        free = not {"layout.replicas", "layout.dp"} & {*self.pins}
        apart = dp // inside if free and inside > 1 and not left and dp % inside == 0 else 1
        states = self._pinned("layout.replica_state", get_args(ReplicaState))
        for zero in zeros:
            for replicas in dict.fromkeys((self._copies(dp), apart if zero else 1)):
                if replicas > 1 and zero:
                    yield from ((zero, replicas, state) for state in states)
                elif replicas == self._copies(dp) and "copied" in states:
                    yield zero, replicas, "copied"

    def pipes(
        self, mesh_shape: MeshShape, fewer: int = MOST_FEWER, near: int = 0
    ) -> Iterator[ScheduleChoice]:
        """Schedules, sizes of the last part, and ZeRO stages with these axes.

        Args:
            mesh_shape: the layouts'.
            fewer: most layers that the last part may give up from an equal share.
            near: devices of a node, within which ZeRO may shard; 0: only over all.
        """
        zeros = [*self.sharding(mesh_shape, near)]
        for schedule, chunks in self._schedules(mesh_shape):
            for less in self._cuts.fewer(mesh_shape.pp, schedule, chunks, fewer):
                for zero, replicas, state in zeros:
                    yield ScheduleChoice(schedule, chunks, zero, less, replicas, state)

    def cut(self, mesh_shape: MeshShape, pipe: ScheduleChoice) -> StageSplit:
        """The layers of each part of the model.

        Raises:
            UserError: there is no such pipeline.
        """
        return self._cuts.of(mesh_shape.pp, pipe.schedule, pipe.virtual_stages, pipe.fewer)

    def config_of(
        self,
        mesh_shape: MeshShape,
        pipe: ScheduleChoice,
        choice: Choice,
        recomputing: int | None = None,
    ) -> Config:
        """The config with these choices; recomputing: `ModelConfig.recomputing`.

        Raises:
            UserError: they conflict with each other or with the model.
        """
        layer, balance = mesh_shape.layer_layout.layout, self.config.layout.balance
        fixed = layer.has_grid or not layer.context_parallel.exchange.any_order
        sizes = self.cut(mesh_shape, pipe).sizes
        layout = dataclasses.replace(
            layer,
            balance="samples" if balance == "tokens" and layer.ring_size > 1 and fixed else balance,
            pp=mesh_shape.pp,
            dp=mesh_shape.dp // pipe.replicas,
            replicas=pipe.replicas,
            replica_state=pipe.replica_state,
            schedule=pipe.schedule,
            virtual_stages=pipe.virtual_stages,
            stage_layers=sizes and tuple(size * self.config.model.period for size in sizes),
            zero=pipe.zero,
            offload=choice.offload,
        )
        if choice.remat == "none":
            layers = None
        else:
            layers = recomputing and recomputing * self.config.model.period
            layers = self.pins.get("model.remat_layers", layers)
        model = dataclasses.replace(self.config.model, remat=choice.remat, remat_layers=layers)
        train = dataclasses.replace(self.config.train, micro_batches=mesh_shape.micro_batches)
        return dataclasses.replace(self.config, model=model, layout=layout, train=train)

    def layer_config(self, layer_layout: LayerLayout) -> Config | None:
        """The config of one micro-batch on these devices; None if it does not divide."""
        model = dataclasses.replace(self.config.model, remat="none", remat_layers=None)
        train = dataclasses.replace(
            self.config.train, global_batch_size=layer_layout.sequences, micro_batches=1
        )
        try:
            return dataclasses.replace(
                self.config, model=model, layout=layer_layout.layout, train=train
            )
        except UserError:
            return None

    # ---- parts --------------------------------------------------------------------------------

    def _layouts(self) -> Iterator[Layout]:
        """Layouts of the axes that share a layer."""
        widths = _divisors(self.gpus, WIDEST)
        pairs = [(tp, 1, 1) for tp in widths]
        pairs += [(1, r, c) for r in widths for c in widths if r * c <= WIDEST and r > 1 < c]
        if {"layout.row", "layout.col"} & {*self.pins}:  # 1 x n is a grid only on request
            pairs += [(1, r, c) for r in widths for c in widths if 1 in (r, c) and r * c > 1]
        longest = max(stack.tokens for stack in self.stacks)
        rings = [cp for cp in widths if cp == 1 or longest // cp >= SHORTEST]
        # Without experts ep is more of dp, so only a pin sets it.
        experts = self.config.model.moe.num_experts if self.config.model.moe else 1
        eps = _divisors(math.gcd(self.gpus, experts), WIDEST)
        axes = pairs, self._pinned("layout.cp", rings), self._pinned("layout.ep", eps)
        ulysses = self.pins.get("layout.ulysses", 1)  # others share the bounds of a ring
        for (tp, row, col), cp, ep in itertools.product(*axes):
            sizes = {"layout.tp": tp, "layout.row": row, "layout.col": col}
            if self.gpus % (tp * row * col * cp * ulysses * ep) or any(
                self._other(*each) for each in sizes.items()
            ):
                continue
            for options in self._options(tp, row * col > 1):
                try:
                    layout = Layout(
                        tp=tp, row=row, col=col, cp=cp, ulysses=ulysses, ep=ep, **options
                    )
                except UserError:
                    continue
                if self._is_even(layout) and satisfies_pins(self.pins, self.config.model, layout):
                    yield layout

    def _is_even(self, layout: Layout) -> bool:
        """True if tokens, heads and hidden units split; the cost model does not cover padding.

        It ignores a grid's padding other than of whole heads for `col`.
        """
        lengths = (stack.tokens % layout.sequence_unit for stack in self.stacks)
        return not any(lengths) and all(
            part.splits(layout) for stack in self.stacks for part in stack.parts
        )

    def _options(self, tp: int, grid: bool) -> Iterator[dict[str, Any]]:
        """The options for algorithms along these axes."""
        names = [
            "layout.ring",
            "layout.latent_exchange",
            "layout.latent_products",
            "layout.keep_gathered",
            *(("layout.matmul2d", "layout.matmul2d_slices") if grid else ()),
        ]
        fixed = {name.partition(".")[2]: self.pins[name] for name in names if name in self.pins}
        if grid:
            for attention2d in self._pinned("layout.attention2d", ("heads", "blocks")):
                yield {**fixed, "attention2d": attention2d}
            return
        both = ((False, False), (True, False), (True, True)) if tp > 1 else ((False, False),)
        for sharded, pieces in both:
            yield {**fixed, "sequence_parallel": sharded, "collective_matmul": pieces}

    def _schedules(self, mesh_shape: MeshShape) -> Iterator[tuple[str, int | None]]:
        """Schedules with their chunks, without those that need more memory for the same time."""
        p, m = mesh_shape.pp, mesh_shape.micro_batches
        schedules: list[tuple[str, int | None]] = [("1f1b", None)]
        if p > 1 and m % p == 0:
            schedules += [("interleaved", c) for c in CHUNKS if self.layers % (p * c) == 0]
        if 1 < p <= LONGEST_SPLIT:
            schedules += [("zb-h1", None)] * (m >= p) + [("zb-v", None)] * (m >= 2 * p - 1)
        if asked := self.pins.get("layout.schedule"):
            pinned = [(asked, self.pins.get("layout.virtual_stages"))] if p > 1 else []
            schedules = [each for each in schedules if each[0] == asked] or pinned
        for schedule, chunks in schedules:
            if not self._other("layout.virtual_stages", chunks):
                yield schedule, chunks

    def _pinned(self, name: str, values: Iterable[Any]) -> list[Any]:
        """The values to try for a field."""
        return [self.pins[name]] if name in self.pins else list(values)

    def _other(self, name: str, value: Any) -> bool:
        """True if a field is pinned to another value."""
        return name in self.pins and bool(self.pins[name] != value)


def _divisors(number: int, most: int | None = None) -> Sequence[int]:
    """Divisors in ascending order.

    >>> _divisors(12, 5)
    [1, 2, 3, 4]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*small, *(number // n for n in small)})
    return [n for n in divisors if most is None or n <= most]
