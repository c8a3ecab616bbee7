"""The plan of a parameter, decided once from the config: all that a step does with it.

ZeRO, offloading, gradient accumulation and the loop over layers have all a say in where a parameter
is, when a device has it whole, and when its gradient is summed over devices. Here they are asked,
and nowhere else: the step, the formulas and the planner read the record.
`python -m jaxptd.memory --explain` prints it.

A step has few groups of parameters that it handles alike: those outside the layers, and of the
layers matrices, and vectors (which are gathered in another precision, several in one message).

Nothing here imports jax.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Literal, NamedTuple, Self, TypeVar

from jaxptd.config import Config, Dtype, OptimizerConfig, itemsize
from jaxptd.config.lora import check_targets
from jaxptd.errors import UserError, did_you_mean, quoted
from jaxptd.layout import ZERO_AXES, Axis, ZeroStage
from jaxptd.shapes import ParamShape, Spec, StoredShape

Runs = Literal["outside", "loop", "unrolled", "stages"]
Where = Literal["device", "host"]
Shards = Literal["none", "stack", "layer"]
Gather = Literal["never", "step", "first_microbatch", "layer"]
Reduce = Literal["end", "last_microbatch", "each_layer"]
Accumulate = Literal["after", "in_loop", "in_tick"]

Info = TypeVar("Info", bound=ParamShape)
BY_LAYER = ("muon",)  # optimizers that look at one layer's matrix at a time, and so at its shards


@dataclasses.dataclass(frozen=True)
class ParamPlan:
    """The handling of each parameter of a group. The defaults: it is there, and whole.

    Args:
        runs: what reads it: the ends of the model (outside of layers), or layers in a loop,
            unrolled, or on the stages of a pipeline.
        where: the memory that the masters are in.
        shards: what is cut into a shard for each device along the batch's axes: nothing, the stack
            of all layers at once (outside of layers the array), or each layer by itself.
        gather: when a device gets the whole block of a parameter that is in shards or on the host:
            at the beginning of the step, while the first micro-batch runs forward (and then holds
            it), or each time a layer runs. Never: it is there.
        gather_dtype: the precision that moves then, in which it is read.
        own_collective: whether it has a collective of its own in an iteration of a loop.
        reduce: when its gradient is summed over the batch's axes: after the last micro-batch,
            beside the layers of the last one, or beside the layers of each.
        sums_replicas: whether its gradient is added up over replicas right after it was reduced,
            beside the layers, and not after the last micro-batch.
        accumulate: when a micro-batch's gradient is added to that of those before: after backward,
            or at once, by a loop over layers or in a tick of a pipeline.
        grad_dtype: the precision in which backward gives the gradient, before it is added up.
    """

    runs: Runs = "loop"
    where: Where = "device"
    shards: Shards = "none"
    gather: Gather = "never"
    gather_dtype: Dtype = "float32"
    own_collective: bool = False
    reduce: Reduce = "end"
    sums_replicas: bool = False
    accumulate: Accumulate = "after"
    grad_dtype: Dtype = "float32"

    @property
    def moves(self) -> bool:
        """True if a layer's block is gathered, or its gradient reduced, while layers run."""
        return self.gather in ("layer", "first_microbatch") or self.reduce != "end"

    @property
    def prefetches(self) -> bool:
        """True if that happens in every micro-batch, beside the other layers of a loop."""
        each = self.gather == "layer" or self.reduce == "each_layer"
        return each and self.runs == "loop"

    @property
    def joins_trips(self) -> bool:
        """True if XLA for GPUs merges two iterations of a loop, which fetches layers, into one."""
        return self.gather == "layer" and self.runs == "loop"

    @property
    def traces_layers(self) -> bool:
        """True if the backward pass of a layer is traced by itself, not with a loop over layers."""
        return self.moves or self.accumulate == "in_loop" or self.runs == "stages"

    @property
    def narrows(self) -> bool:
        """True if backward rounds the gradient of a parameter that it reads in float32."""
        return self.gather == "never" and self.grad_dtype in ("bfloat16", "float16")

    @property
    def stage(self) -> ZeroStage:
        """The stage of ZeRO as a step runs it."""
        if self.shards == "none":
            return 0
        if self.reduce != "each_layer":
            return 1
        return 3 if self.gather == "layer" else 2

    # ---- in one micro-batch ----------------------------------------------------------------------

    @cached_property
    def first(self) -> "ParamPlan":
        """In the first of several micro-batches: what the last one reduces stays whole."""
        if self.reduce != "last_microbatch":
            return self
        narrow = self.accumulate == "after"
        dtype = self.gather_dtype if narrow else self.grad_dtype
        return dataclasses.replace(self, reduce="end", sums_replicas=False, grad_dtype=dtype)

    @cached_property
    def middle(self) -> "ParamPlan":
        """In those between: blocks are held, and what the last one reduces stays whole."""
        return dataclasses.replace(self.first, gather="step")


WHOLE = ParamPlan()  # of parameters that are there, with gradients as JAX gives them


class Why(NamedTuple):
    """The reason for a field of a plan, in words: what the config says, and what follows."""

    where: str
    gather: str
    reduce: str
    accumulate: str
    grad_dtype: str


def plan_of(config: Config, info: ParamShape) -> ParamPlan:
    """The plan of a parameter of a config's model."""
    return explained(config, info)[0]


def explained(config: Config, info: ParamShape) -> tuple[ParamPlan, Why]:
    """The plan of a parameter, and the reasons for it.

    A grid sums gradients inside a layer, in the precision of the parameter: its layers' matrices
    are gathered in float32 then.
    """
    in_layers = info.stack is not None
    narrow = info.cast and not (in_layers and Axis.ROW in info.axes)
    if not in_layers:
        return _outside(config, narrow=narrow)
    sizes, others = config.layout.sizes, (axis for axis in ZERO_AXES if axis not in info.axes)
    alone = math.prod(sizes[axis] for axis in others) == 1
    return _of_layers(config, narrow=narrow, matrix=bool(info.matrix), alone=alone)


def layers_plan(config: Config) -> ParamPlan:
    """The plan of the layers' matrices.

    Vectors of layers differ from it in `gather_dtype`, `own_collective` and `grad_dtype`.
    """
    return _of_layers(config, narrow=not config.layout.has_grid, matrix=True)[0]


def layers_are_alone(config: Config) -> bool:
    """True if no other device along ZeRO's axes has the same layers."""
    return config.layout.zero_shards == 1


def _wide(config: Config) -> Dtype:
    """The precision of masters and of sums of gradients."""
    return max(config.model.dtype, "float32", key=itemsize)


def _where(config: Config) -> tuple[Where, str]:
    zero = config.layout.zero
    why = f"layout.zero={zero}: a {'shard' if zero else 'copy'} on each device along dp, ep and cp"
    if zero and config.layout.replicas > 1:
        what = "each split over" if config.layout.splits_state else "a state for each of"
        why += f", {what} layout.replicas={config.layout.replicas}"
    if config.layout.hosts_parameters:
        return "host", f"layout.offload={','.join(sorted(config.layout.offloaded))}; {why}"
    return "device", why


def _outside(config: Config, *, narrow: bool) -> tuple[ParamPlan, Why]:
    """Embeddings, the last norm, and what all layers read: as at stage 1 of ZeRO, if at any.

    Their gradients are float32 whatever is read: a look-up adds up those of equal tokens.
    """
    layout, wide = config.layout, _wide(config)
    where, why_where = _where(config)
    gather: Gather = "step"
    if layout.zero:
        gathered = f"layout.zero={layout.zero}: all of the step reads them"
    elif where == "host":
        gathered = "copied from the host: all of the step reads them"
    elif layout.pp > 1:
        gathered = f"layout.pp={layout.pp}: each stage has a share of them, and reads all"
    else:
        gather, gathered = "never", "layout.zero=0: each device has all"
    plan = ParamPlan(
        "outside",
        where,
        shards="stack" if layout.zero else "none",
        gather=gather,
        gather_dtype=config.model.dtype if narrow else wide,
        grad_dtype=wide,
    )
    return plan, Why(
        why_where,
        gathered,
        "their gradients are whole when the first layer's backward is done",
        "no loop has them",
        "a look-up adds up the gradients of equal tokens",
    )


def _of_layers(
    config: Config, *, narrow: bool, matrix: bool, alone: bool = False
) -> tuple[ParamPlan, Why]:
    """alone: whether no other device along the axes of samples has the same block."""
    layout, wide = config.layout, _wide(config)
    runs: Runs = "stages" if layout.pp > 1 else "loop" if config.model.scan_layers else "unrolled"
    where, why_where = _where(config)
    gather, gathered = _gather(config, runs)
    reduce, reduced = _reduce(config, runs, gather, alone=alone)
    accumulate, accumulated = _accumulate(config, runs, gather=gather, reduce=reduce)
    gather_dtype = config.model.dtype if narrow else wide
    narrows, graded = _narrows(config, runs, gather=gather, reduce=reduce, accumulate=accumulate)
    moved = gather in ("layer", "first_microbatch") or reduce != "end"
    once = reduce == "last_microbatch" or (
        reduce == "each_layer" and runs != "stages" and config.train.micro_batches == 1
    )
    one_by_one = moved or config.optimizer.name in BY_LAYER
    plan = ParamPlan(
        runs,
        where,
        shards="none" if layout.zero == 0 else "layer" if one_by_one else "stack",
        gather=gather,
        gather_dtype=gather_dtype,
        own_collective=matrix and config.model.scan_layers,
        reduce=reduce,
        sums_replicas=once and layout.replicas > 1 and not layout.splits_state,
        accumulate=accumulate,
        grad_dtype=gather_dtype if narrows else wide,
    )
    if layout.zero and layout.replicas > 1:
        when = "beside the layers" if plan.sums_replicas else "at the end of the step"
        how = "reduce-scattered" if layout.splits_state else "added up"
        reduced += f"; {how} over replicas {when}"
    return plan, Why(why_where, gathered, reduced, accumulated, graded)


def _gather(config: Config, runs: Runs) -> tuple[Gather, str]:
    layout = config.layout
    if layout.zero == 3:
        return "layer", "layout.zero=3: freed when the layer has run, and gathered for backward"
    if layout.fetches_layers:
        return "layer", "layout.offload has parameters: copied when the layer runs, and freed"
    if layout.zero == 0:
        if layout.hosts_parameters:
            return "step", "copied from the host, where layout.offload=optimizer keeps them"
        return "never", "layout.zero=0: each device has all"
    if runs == "loop":
        return (
            "first_microbatch",
            f"layout.zero={layout.zero}: beside other layers, and kept for the step",
        )
    return "step", f"layout.zero={layout.zero}: at its beginning, for all micro-batches"


def _reduce(config: Config, runs: Runs, gather: Gather, *, alone: bool) -> tuple[Reduce, str]:
    """With one micro-batch stage 1 sends what stage 2 sends: a loop does it as stage 2.

    With several it writes the sums of layers beside those of the micro-batches before. Experts that
    no other device has are added up in place.
    """
    zero, many = config.layout.zero, config.train.micro_batches
    if zero >= 2:
        return "each_layer", f"layout.zero={zero}: a device keeps its shard of the sum"
    if zero == 1 and runs == "loop" and many == 1:
        return "each_layer", "layout.zero=1 with one micro-batch: the same bytes, beside the layers"
    if gather == "first_microbatch":
        if alone and not layers_are_alone(config):
            return "end", "no other device along dp and cp has these experts"
        return "last_microbatch", f"layout.zero=1: once for {many} micro-batches, beside the layers"
    if config.layout.batch_shards == 1:
        return "end", "no other device along dp, ep or cp has a part of the sum"
    return "end", f"layout.zero={zero}: once a step"


def _accumulate(
    config: Config, runs: Runs, *, gather: Gather, reduce: Reduce
) -> tuple[Accumulate, str]:
    """A loop adds to sums in place, if its layers' gradients are traced by themselves.

    Where nothing moves it does not if it would copy sums, of a stack in two loops, or make in each
    layer what layers that keep all share: biases by distance, the norm of a source. Stage 1
    makes these in each layer in its first and last micro-batch, and therefore in all of them.
    """
    model, many = config.model, config.train.micro_batches
    if runs == "stages":
        return "in_tick", "a pipeline adds a layer's gradient in the tick that computes it"
    if many == 1:
        return "after", "train.micro_batches=1: there is nothing to add to"
    if runs == "unrolled":
        return "after", "model.scan_layers=false: no loop"
    if many == 2 and reduce == "last_microbatch":
        return "after", "the first of two micro-batches is the sum, the last one sends it"
    if gather == "layer" or reduce == "each_layer":
        return "in_loop", "one layer's gradients at a time, where they are moved"
    shared = model.block.relative is not None
    if not (shared and gather == "first_microbatch"):
        if model.remat_layers is not None:
            return "after", "model.remat_layers: of a stack in two loops the sums would be copied"
        if shared and model.remat == "none":
            return "after", "model.remat=none: layers share biases by distance and a source's norm"
    return "in_loop", "no micro-batch's gradients are in memory as a whole"


def _narrows(
    config: Config, runs: Runs, *, gather: Gather, reduce: Reduce, accumulate: Accumulate
) -> tuple[bool, str]:
    """Decides if gradients of layers have the precision that products read parameters in.

    Backward computes them in it. Where a loop moves nothing it stacks them so. A pipeline adds a
    layer's to a sum at once, as a loop of several micro-batches does, and a grid sums them inside a
    layer, in float32. With moments on the host no memory was won (`results/experiments.md`); there,
    as wherever parameters are gathered, layers read the narrow copy.
    """
    if reduce != "end":
        return False, "summed over devices in float32"
    if accumulate == "in_loop":
        return False, "added to a float32 sum"
    if gather != "never":
        return True, "as backward computes it"
    if config.layout.has_grid:
        return False, "a grid sums inside a layer"
    if runs == "loop":
        return True, "as backward computes it; a loop stacks those of its layers"
    return False, "added to a float32 sum" if runs == "stages" else "as the parameters are"


# ---- the state as shapes and axes, without its arrays; `shards.py` and `zero.py` have those ------
# Letters: L layers, Z devices along the batch's axes, n elements of a block with its padding.


@dataclasses.dataclass(frozen=True, eq=False)
class ShardShape:
    """Shapes of a sharded parameter: `[L, ..]` if layers are sharded one by one, else flat.

    Args:
        info: of the parameter as layers hold it.
        sizes: devices along each axis.
        lead: leading dims that are not flattened: 1 if layers are sharded one by one, else 0.
        split: the axes over which each shard is split between steps: none, or replicas.
    """

    info: ParamShape
    sizes: Mapping[Axis, int]
    lead: int
    split: tuple[Axis, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The canonical shape."""
        return self.info.shape

    @property
    def is_canonical(self) -> bool:
        return False

    @cached_property
    def axes(self) -> frozenset[str]:
        """The mesh axes that the parameter is sharded over."""
        return self.info.axes | {*self.holders}

    @cached_property
    def along(self) -> tuple[Axis, ...]:
        """The axes over which shards are dealt out: those of ZeRO that do not shard the parameter.

        An expert's parameters are split over ep already.
        """
        return tuple(axis for axis in ZERO_AXES if axis not in self.info.axes)

    @property
    def holders(self) -> tuple[Axis, ...]:
        """The axes over which the state is dealt out: those of its shards, and of their parts."""
        return (*self.along, *self.split)

    @cached_property
    def devices(self) -> int:
        """Devices that share a block: Z."""
        return math.prod(self.sizes[axis] for axis in self.along)

    @cached_property
    def parts(self) -> int:
        """Parts of a shard: one for each replica if they split it."""
        return math.prod(self.sizes[axis] for axis in self.split)

    @cached_property
    def _splits(self) -> list[int]:
        """The number of blocks along each dim that is flattened."""
        dims = self.info.axes_of_dims[self.lead :]
        return [math.prod(self.sizes[Axis(axis)] for axis in axes) for axes in dims]

    @cached_property
    def block_shape(self) -> tuple[int, ...]:
        """The shape that layers hold on one device, without the leading dim."""
        sizes = self.info.stored_shape[self.lead :]
        return tuple(n // split for n, split in zip(sizes, self._splits, strict=True))

    @cached_property
    def shard_size(self) -> int:
        """Elements of one shard, all parts of it together."""
        return self.part_size * self.parts

    @cached_property
    def part_size(self) -> int:
        """Elements of a shard that a device has between steps."""
        return -(-math.prod(self.block_shape) // (self.devices * self.parts))

    @cached_property
    def padded_size(self) -> int:
        """Elements of all shards of a block."""
        return self.shard_size * self.devices

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """The global shape that the state holds."""
        return (*self.info.stored_shape[: self.lead], math.prod(self._splits) * self.padded_size)

    @property
    def spec(self) -> Spec:
        """The axes that shard each dim of the state's form."""
        axes = [axis for axes in self.info.axes_of_dims[self.lead :] for axis in axes]
        return (*self.info.spec[: self.lead], (*axes, *self.holders))


def check_rates(optimizer: OptimizerConfig, infos: Mapping[str, ParamShape]) -> None:
    """Raises UserError if a pattern of `optimizer.rates` names no parameter, or two name one."""
    names = [name for name, info in infos.items() if info.optimized]
    found = {name: [*optimizer.rates_of(name)] for name in names}
    for pattern in optimizer.rates or ():
        if not any(pattern in each for each in found.values()):
            remedy = did_you_mean(pattern, names, otherwise="* stands for any letters")
            raise UserError(
                f"optimizer.rates: {quoted(repr(pattern))} names no parameter that the optimizer "
                f"updates; {remedy}"
            )
    for name, (first, *others) in ((name, each) for name, each in found.items() if each):
        if others:
            raise UserError(
                f"optimizer.rates: {quoted(repr(first))} and {quoted(repr(others[0]))} both name "
                f"{name}; let one pattern name each parameter"
            )


def with_frozen(config: Config, infos: Mapping[str, Info]) -> Mapping[str, Info]:
    """Marks the parameters that do not train.

    Raises:
        UserError: a pattern names no parameter, or nothing is left to train.
    """
    if not config.freezes_some:
        return infos
    for pattern in config.optimizer.frozen or ():
        if not fnmatch.filter(infos, pattern):
            remedy = did_you_mean(pattern, infos, otherwise="* stands for any letters")
            raise UserError(f"optimizer.frozen={quoted(pattern)} names no parameter; {remedy}")
    check_targets(config.model.lora, infos)
    marked = {
        name: dataclasses.replace(info, frozen=config.freezes(name)) for name, info in infos.items()
    }
    if not any(info.optimized for info in marked.values()):
        raise UserError("optimizer.frozen names all parameters; leave some of them to train")
    return marked


@dataclasses.dataclass(frozen=True)
class StateShapes:
    """The forms in which a state holds its parameters.

    Args:
        infos: of the parameters.
        sizes: devices along each axis.
        plans: what a step does with each parameter.
        layers: the plan of the layers' matrices.
        split: as in `ShardShape`.
    """

    infos: Mapping[str, ParamShape]
    sizes: Mapping[Axis, int]
    plans: Mapping[str, ParamPlan]
    layers: ParamPlan
    split: tuple[Axis, ...] = ()

    @classmethod
    def of(cls, config: Config, infos: Mapping[str, ParamShape]) -> Self:
        """The state of a config with these parameters, of which it may freeze some."""
        infos = with_frozen(config, infos)
        check_rates(config.optimizer, infos)
        plans = {name: plan_of(config, info) for name, info in infos.items()}
        split = (Axis.REPLICAS,) if config.layout.splits_state else ()
        return cls(infos, config.layout.sizes, plans, layers_plan(config), split)

    @cached_property
    def stored(self) -> Mapping[str, StoredShape]:
        """Shapes and shardings of the parameters, as the state holds them."""
        if self.layers.shards == "none":
            return self.infos
        sizes, split = self.sizes, self.split
        return {n: ShardShape(info, sizes, self.lead(n), split) for n, info in self.infos.items()}

    def lead(self, name: str) -> int:
        """`ShardShape.lead` of a parameter."""
        return int(self.plans[name].shards == "layer")
