"""Predicts the peak memory of a device in a training step on GPUs, as XLA compiles it.

A step has a few moments at which its memory may be fullest: the backward pass of each loop over
layers, the loss, and the update. Each is a list of what lives then; the fullest is the peak. The
terms are facts of the program, read off the live ranges of compiled steps; `docs/memory.md`
explains them and has the errors.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from jaxptd.analysis import memory_model
from jaxptd.analysis.memory_model import DeviceLayers
from jaxptd.analysis.peak import working
from jaxptd.analysis.peak.working import handed_on
from jaxptd.config import Config
from jaxptd.layout import Layout
from jaxptd.models.families import architecture_of, sizes_of
from jaxptd.parts.ends import EndBytes
from jaxptd.parts.sizes import Sizes
from jaxptd.parts.working import PairBytes
from jaxptd.pipeline.placement import Stages, of_stack
from jaxptd.zero.plan import ParamPlan, layers_plan

# ---- loops over layers ---------------------------------------------------------------------------
# The loops over layers of a step: what each keeps for backward, and copies of its parameters.
#
# Bytes are of one device.


@dataclasses.dataclass(frozen=True)
class Loop:
    """Layers that run in one loop.

    Args:
        config: of the run.
        stack: the layers.
        parameters: bytes of their gradients, as the state holds them.
        shares: whether other loops run layers of the same stack.
        between: slots for what a split backward hands from its first half to its second.
    """

    config: Config
    stack: DeviceLayers
    parameters: int
    shares: bool = False
    between: int = 0

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of a layer."""
        stack = self.stack.stack
        return sizes_of(self.config).with_tokens(stack.tokens, stack.hidden)

    @cached_property
    def pairs(self) -> tuple[PairBytes, ...]:
        """The bytes of a layer's parts."""
        return tuple(part.pair_bytes(self.sizes) for part in self.stack.stack.parts)

    @property
    def is_fp8(self) -> bool:
        """True if products of whole matrices are in 8 bits; a grid has those of panels."""
        return self.config.model.products == "fp8" and not self.config.layout.has_grid

    # ---- activations ---------------------------------------------------------------------------

    @cached_property
    def kept(self) -> int:
        """Bytes that backward needs: stacked over the layers, or a pipeline's pools."""
        remat = self.stack.remat
        one = memory_model.layer(self.config, self.stack.stack, remat) - self._not_kept()
        if "activations" in self.config.layout.offloaded and remat == "dots":
            one = 0
        kept = one * self.stack.micro_batches
        if self.between:
            kept += self.between * handed_on(self.config, self.pairs, self.stack.remat)
        return kept * self.stack.layers

    def _not_kept(self) -> int:
        """Bytes of a layer that the formula counts and XLA does not have.

        On a grid `dots` names attention's output twice, which XLA finds outside of pools. In fp8
        products keep what they take in 8 bits, but for those in ring steps and where it is
        gathered again; attention keeps its output in 16 bits besides.
        """
        remat, outputs = self.stack.remat, sum(pair.output for pair in self.pairs)
        grid = self.config.layout.has_grid and self.config.layout.pp == 1
        if remat == "dots" and grid and not self.sizes.has_blocks:
            return outputs
        if remat == "none" and self.is_fp8 and not self.config.layout.collective_matmul:
            first = [0 if x.again else x.taken for x in self.pairs]
            taken = sum(first) + sum(x.second_in_8_bits for x in self.pairs)
            return (taken - outputs) // 2
        return 0

    @cached_property
    def working(self) -> int:
        """The tensors of one layer, with what ZeRO moves meanwhile.

        At stage 3, and out of host memory, that is the layer's parameters, or those of the next
        one. A loop that moves them under other layers also has the gradients of the last one, and
        from stage 2 on those of one matrix, in float32, on their way; where stage 1's last
        micro-batch sends a layer as one message, and on a grid, those of the layer.
        """
        config, sizes = self.config, self.sizes
        working_bytes = working.layer(self.pairs, self.stack.remat, at_once=self._at_once)
        plan = layers_plan(config)
        moved = ((plan.gather == "layer") + plan.prefetches) * self._whole
        on_way = self._largest if plan.prefetches and plan.reduce == "each_layer" else 0
        at_once = plan.reduce == "last_microbatch" or config.layout.has_grid
        on_way = self.weights if at_once else on_way
        moved += on_way * sizes.master_itemsize // sizes.matrix_shards
        return working_bytes + moved

    @property
    def _at_once(self) -> bool:
        """True if products for gradients of weights do not wait for the end of a layer's backward.

        With norms of sums, and all computed again, they were not seen to wait for whole scores.
        """
        config, scores = self.config, any(each.has_scores for each in self.pairs)
        early = config.model.block.norm_order == "post" and self.stack.remat == "full" and scores
        return config.layout.pp > 1 or early

    @property
    def gathered(self) -> int:
        """Parameters of the last layer, gathered from forward on where backward begins with it."""
        return self._whole if layers_plan(self.config).joins_trips else 0

    @property
    def _whole(self) -> int:
        """The matrices of a layer, in the precision of activations."""
        return self.weights * self.sizes.itemsize // self.sizes.matrix_shards

    @property
    def waiting(self) -> int:
        """Bytes that layers keep, and that products for gradients take where XLA runs them late.

        It hides sums over devices behind them, and has enough with those of half of the layers.
        """
        gradients = sum(each.first + each.x for each in self.pairs)
        return self.kept + self.stack.layers * gradients // 2

    @property
    def turned(self) -> int:
        """The largest kept array that XLA transposes for products of backward, of all layers."""
        layout = self.config.layout
        gathers = layout.sequence_parallel or layout.has_grid
        return self.pairs[0].x * self.stack.layers if gathers and self.stack.remat == "dots" else 0

    # ---- parameters ----------------------------------------------------------------------------

    @cached_property
    def weights(self) -> int:
        """Elements of a layer's matrices on all devices."""
        return self.stack.stack.weights

    def share(self, elements: int) -> int:
        """Bytes of a part of the parameters that has so many elements of a layer's matrices."""
        return self.parameters * elements // self.weights

    @property
    def largest(self) -> int:
        """Bytes of the largest matrix of all layers."""
        return self.share(self._largest)

    @property
    def _largest(self) -> int:
        """Elements of a layer's largest matrix on all devices."""
        return max(part.first_weights for part in self.stack.stack.parts)

    @cached_property
    def copies(self) -> int:
        """Copies of parameters that XLA makes for the loop."""
        split = self.shares or not self.config.model.scan_layers
        copied = self.parameters if split else 0
        if self.sizes.has_blocks:  # the matrix behind attention, transposed
            turned = sum(part.turned_weights() for part in self.stack.stack.parts)
            copied += self.share(turned)
        return copied


def loops_of(
    config: Config, state: Mapping[str, int], plan: Stages | None, ends: int
) -> list[Loop]:
    """The loops over layers of a device, in the order of forward.

    Args:
        config: of the run.
        state: as `memory_model.state` gives it.
        plan: of the pipeline; None without one.
        ends: bytes of the parameters outside the layers.
    """
    stacks = memory_model.stacks(config, plan)
    weights = [each.layers * each.stack.weights for each in stacks]
    layers, names = state["gradients"] - ends, [each.stack.name for each in stacks]
    slots = plan.slots if plan else {}
    return [
        Loop(
            config,
            stack,
            parameters=layers * weight // sum(weights),
            shares=names.count(name) > 1 and plan is None,
            between=slots.get(of_stack("between", name), 0),
        )
        for stack, weight, name in zip(stacks, weights, names, strict=True)
    ]


# ---- memory outside of the compiled program ------------------------------------------------------

MIB = 2**20


class Outside(NamedTuple):
    """Memory that is no array of the program.

    Args:
        name: in words.
        bytes: of it on one device.
        source: where the figure is from.
    """

    name: str
    bytes: int
    source: str


CONTEXT = Outside("CUDA context", 500 * MIB, "judged: kernels and the context itself, 0.4-0.6 GiB")
WORKSPACE = Outside(
    "cuBLAS and cuDNN workspace", 128 * MIB, "judged: XLA's is in the program, the libraries' not"
)
NCCL = Outside("NCCL buffers", 512 * MIB, "judged: 0.5-2 GiB, grows with communicators")
OUTSIDE = (CONTEXT, WORKSPACE, NCCL)


def outside(layout: Layout) -> tuple[Outside, ...]:
    """The memory outside of the program on a device of a layout: without collectives no NCCL."""
    return OUTSIDE if layout.num_devices > 1 else OUTSIDE[:2]


# ---- the peak of a step --------------------------------------------------------------------------

MARGIN = 0.01  # of all but the state, for gaps between arrays and the scheduler's choices
ID = 4  # bytes of a token's number


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes of a device at the fullest moment of a step.

    Args:
        moment: layers (their backward pass), loss, or update.
        state: parameters and moments that the device has from step to step, and the batch.
        gathered: whole parameters of a step, and of a layer for backward.
        kept: what layers keep for backward.
        mail: what waits for a stage of a pipeline.
        gradients: sums over micro-batches, and those of the present one.
        working: the tensors of one layer.
        logits: with the head's table.
        copies: of parameters, which XLA makes for a loop over layers, or to move them.
        margin: for gaps between arrays.
    """

    moment: str
    state: int
    gathered: int = 0
    kept: int = 0
    mail: int = 0
    gradients: int = 0
    working: int = 0
    logits: int = 0
    copies: int = 0
    margin: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        names = (field.name for field in dataclasses.fields(self) if field.name != "moment")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        """Bytes of the compiled step, without what is outside of it (`outside`)."""
        return sum(self.parts.values())


def peak(config: Config, state: Mapping[str, int], plan: Stages | None) -> Peak:
    """Predicts the peak memory of a device.

    Args:
        config: of the run.
        state: as `memory_model.state` gives it.
        plan: of the pipeline; None without one.
    """
    ends = architecture_of(config.padded_model).end_bytes(sizes_of(config))
    step = _Step(config, state, plan, ends, loops_of(config, state, plan, ends.parameters))
    fullest = max(step.moments(), key=lambda each: each.total)
    return dataclasses.replace(fullest, margin=round(MARGIN * (fullest.total - fullest.state)))


@dataclasses.dataclass(frozen=True)
class _Step:
    """Lists what lives at the moments of a step; the fields are those of `peak`, and the parts."""

    config: Config
    state: Mapping[str, int]
    plan: Stages | None
    ends: EndBytes
    loops: list[Loop]

    def moments(self) -> Iterator[Peak]:
        """The moments at which memory may be fullest."""
        if self.plan:
            yield from self._ticks(self.plan)
        else:
            yield from map(self._backward, range(len(self.loops)))
            yield self._loss()
            yield self._turned()
        if self._is_late:
            yield self._late()
        yield self._update()

    # ---- at several moments --------------------------------------------------------------------

    @cached_property
    def _from_step_to_step(self) -> int:
        """The state, where it is the device's, and the batch: tokens and targets."""
        sizes, train = sizes_of(self.config), self.config.train
        embedded = architecture_of(self.config.padded_model).embedded
        tokens = embedded * sizes.sequences * train.micro_batches
        kept = self.state["parameters"] + self.state["optimizer"]
        kept -= memory_model.hosted(self.config.layout, self.state)
        return kept + 2 * ID * tokens // self.config.layout.cp

    @cached_property
    def _x(self) -> int:
        """The arrays like x behind the layers."""
        streams = architecture_of(self.config.padded_model).streams(sizes_of(self.config))
        return working.ENDS * streams[-1]

    def _gathered(self) -> int:
        """Whole parameters; with one micro-batch those outside the layers are counted elsewhere."""
        gathered = self.state["gathered"]
        if self.plan or self._sums or self._params.shards == "none":
            return gathered
        sizes = sizes_of(self.config)
        return gathered - min(
            gathered, self.ends.parameters * sizes.itemsize // sizes.master_itemsize
        )

    @cached_property
    def _params(self) -> ParamPlan:
        """The plan of the layers' matrices."""
        return layers_plan(self.config)

    @property
    def _sums(self) -> int:
        """Sums of gradients over micro-batches, outside of pipelines; 0 with one."""
        return self.state["gradients"] if self.config.train.micro_batches > 1 else 0

    @property
    def _narrowing(self) -> int:
        """Times that gradients of layers are narrower than the state, until they are summed."""
        sizes, plan = sizes_of(self.config), self._params
        narrow = plan.narrows or (plan.reduce != "each_layer" and sizes.casts)
        return sizes.master_itemsize // sizes.itemsize if narrow else 1

    def _stacked(self, loops: list[Loop]) -> int:
        """Gradients that loops stack beside sums: a micro-batch's, or shards of the last one's."""
        config, layout, plan = self.config, self.config.layout, self._params
        parameters, adds = sum(each.parameters for each in loops), plan.accumulate == "in_loop"
        if plan.reduce == "last_microbatch" and (adds or config.train.micro_batches == 2):
            return parameters // (layout.dp * layout.cp)
        return 0 if adds else parameters // self._narrowing

    @cached_property
    def _before_backward(self) -> Peak:
        """The moment when backward begins."""
        state, kept = self._from_step_to_step, sum(each.kept for each in self.loops)
        gathered = self._gathered() + sum(each.gathered for each in self.loops)
        return Peak("loss", state=state, gathered=gathered, kept=kept)

    # ---- without a pipeline --------------------------------------------------------------------

    def _backward(self, number: int) -> Peak:
        """The backward pass of a loop: those before it still keep, those behind have gradients.

        With several micro-batches zeros for the gradients of all loops are there from the first on.
        """
        before, behind = self.loops[: number + 1], self.loops[0 if self._sums else number :]
        model = self.config.model
        # Unrolled, gradients come as what was kept goes.
        gradients = self._stacked(behind) * model.scan_layers
        # The head's table has a gradient of its own; a sum takes that of a tied one at once.
        table = self.ends.gradient if not (self._sums and model.tie_embeddings) else 0
        return dataclasses.replace(
            self._before_backward,
            moment="layers",
            gathered=self._gathered() + sum(each.gathered for each in before),
            kept=sum(each.kept for each in before),
            gradients=self._sums + gradients + table,
            working=self.loops[number].working,
            copies=sum(each.copies for each in before),
        )

    def _loss(self) -> Peak:
        """The gradient of the logits, and the head's table and its gradient.

        Where gradients are summed over dp XLA allocates those of the last loop before that.
        """
        early = self.config.layout.dp > 1 and self._params.shards == "none"
        model = self.config.model
        zeros = self._stacked(self.loops) if early and not self._sums else 0
        return dataclasses.replace(
            self._before_backward,
            gradients=self._sums + zeros * model.scan_layers,
            working=self._x,
            logits=self.ends.logits + self.ends.product,
            copies=0 if model.scan_layers else sum(each.copies for each in self.loops),
        )

    def _turned(self) -> Peak:
        """Between both: the loop's gradients are there, as zeros, and a kept array twice."""
        first = self.loops if self._sums else self.loops[-1:]
        return dataclasses.replace(
            self._before_backward,
            gradients=self._sums + self._stacked(first),
            working=self._x + max(each.turned for each in self.loops),
            logits=2 * self.ends.narrow,
            copies=sum(each.copies for each in self.loops),
        )

    @property
    def _is_late(self) -> bool:
        """True if XLA hides sums over devices behind products for gradients of unrolled layers."""
        layout = self.config.layout
        unrolled = not self.config.model.scan_layers and self.plan is None
        return unrolled and layout.dp * layout.cp > 1

    def _late(self) -> Peak:
        """The backward pass of unrolled layers where such products are late."""
        waiting = sum(each.waiting for each in self.loops)
        return dataclasses.replace(self._before_backward, moment="layers", kept=waiting)

    # ---- a pipeline ----------------------------------------------------------------------------

    def _ticks(self, plan: Stages) -> Iterator[Peak]:
        """A tick: the loss, or a layer. All pools, sums of gradients and copies are there."""
        moment = dataclasses.replace(
            self._before_backward,
            mail=memory_model.mail(self.config, plan),
            gradients=self.state["gradients"],
            copies=sum(each.copies for each in self.loops),
        )
        tables = 1 if self.config.model.tie_embeddings else 2
        logits = self.ends.logits + tables * self.ends.narrow
        yield dataclasses.replace(moment, logits=logits, working=self._x)
        largest = max(each.working for each in self.loops)
        yield dataclasses.replace(moment, moment="layers", working=largest)

    # ---- the update ----------------------------------------------------------------------------

    def _update(self) -> Peak:
        """All gradients, and the sum of the largest, or what is back from the host of it."""
        layout, gradients = self.config.layout, self.state["gradients"]
        moment = Peak("update", state=self._from_step_to_step)
        largest = max(each.largest for each in self.loops)
        if layout.hosts_moments and layout.update_on == "device":
            # One array more, and one where gradients are summed over micro-batches.
            arrays = memory_model.hosted(layout, self.state) // self.state["parameters"]
            shards = layout.dp * layout.cp if self._params.stage == 1 else 1
            more = (arrays + 1 + (self._sums > 0)) * largest // shards
            return dataclasses.replace(moment, gradients=gradients, copies=more)
        comes = layout.hosts_parameters and layout.update_on == "device"
        narrow = (comes or self._params.narrows) and not self._sums
        narrowing = self._narrowing if narrow else 1
        if self._params.shards == "none" and layout.dp * layout.cp > 1:
            return dataclasses.replace(moment, gradients=gradients + largest // narrowing)
        layers = sum(each.parameters for each in self.loops)
        # Of parameters one comes, one is updated and one goes; not all are the largest.
        copies = 5 * largest // 2 if comes and layout.zero == 0 else 0
        gradients += layers // narrowing - layers
        return dataclasses.replace(moment, gradients=gradients, copies=copies)
