"""Predicts a device's peak memory in a training step on GPUs, as XLA compiles it.

A step's memory may peak at a few moments: the backward pass of each loop over layers, the loss, and
the update. Each moment lists what is alive; the fullest is the peak. The terms are facts of the
program, read off the live ranges of compiled steps; `docs/memory.md` explains them and gives the
errors.
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
# A step's loops over layers: what each saves for backward, and copies of its parameters.
#
# Bytes are of one device.


@dataclasses.dataclass(frozen=True)
class Loop:
    """Layers that run in one loop.

    Args:
        config: the run's.
        stack: the layers.
        parameters: bytes of their gradients, in the state's form.
        shares: whether other loops run layers of the same stack.
        between: slots for what the first half of a split backward hands to the second.
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
        """True if whole matrices are multiplied in 8 bits; a grid multiplies panels."""
        return self.config.model.products == "fp8" and not self.config.layout.has_grid

    # ---- activations ---------------------------------------------------------------------------

    @cached_property
    def kept(self) -> int:
        """Bytes saved for backward: stacked over the layers, or a pipeline's pools."""
        remat = self.stack.remat
        one = memory_model.layer(self.config, self.stack.stack, remat) - self._not_kept()
        if "activations" in self.config.layout.offloaded and remat == "dots":
            one = 0
        kept = one * self.stack.micro_batches
        if self.between:
            kept += self.between * handed_on(self.config, self.pairs, self.stack.remat)
        return kept * self.stack.layers

    def _not_kept(self) -> int:
        """Bytes of a layer that the formula counts but XLA does not allocate.

        On a grid `dots` names attention's output twice, which XLA notices outside pools. In fp8
        matmuls save their input in 8 bits, except in ring steps and where it is gathered again;
        attention also saves its output in 16 bits.
        """
        remat, outputs = self.stack.remat, sum(pair.output for pair in self.pairs)
        grid = self.config.layout.has_grid and self.config.layout.pp == 1
        if remat == "dots" and grid and not self.sizes.has_blocks:
            return outputs
        if remat == "none" and self.is_fp8 and not self.config.layout.collective_matmul:
            return (sum(pair.in_8_bits for pair in self.pairs) - outputs) // 2
        return 0

    @cached_property
    def working(self) -> int:
        """Tensors of one layer, with what ZeRO moves meanwhile.

        At stage 3, and from host memory, these are the parameters of this layer or of the next. A
        loop that moves them under other layers also holds the last layer's gradients. From stage 2
        on it holds those of one matrix in flight, in float32; where stage 1's last micro-batch
        sends a layer in one collective, and on a grid, those of the layer.
        """
        config, sizes = self.config, self.sizes
        each = len(self.pairs) // self.stack.stack.period
        working_bytes = max(
            working.layer(self.pairs[i : i + each], self.stack.remat, at_once=self._at_once)
            for i in range(0, len(self.pairs), each)
        )
        plan = layers_plan(config)
        moved = ((plan.gather == "layer") + plan.prefetches) * self._whole
        on_way = self._largest if plan.prefetches and plan.reduce == "each_layer" else 0
        at_once = plan.reduce == "last_microbatch" or config.layout.has_grid
        on_way = self.weights if at_once else on_way
        return working_bytes + moved + int(on_way * sizes.master_itemsize)

    @property
    def _at_once(self) -> bool:
        """True if weight-gradient matmuls do not wait for the end of a layer's backward.

        With norms of sums and full recomputation they were not seen to wait for whole scores.
        """
        config, scores = self.config, any(each.has_scores for each in self.pairs)
        early = config.model.block.norm_order == "post" and self.stack.remat == "full" and scores
        return config.layout.pp > 1 or early

    @property
    def gathered(self) -> int:
        """Parameters of the last layer, which stay gathered if backward begins with it."""
        return self._whole if layers_plan(self.config).joins_trips else 0

    @property
    def _whole(self) -> int:
        """The matrices of a layer, in activations' precision."""
        return int(self.weights * self.sizes.itemsize)

    @property
    def waiting(self) -> int:
        """Saved bytes that wait for weight-gradient matmuls where XLA runs these late.

        XLA hides all-reduces behind them; those of half of the layers suffice.
        """
        gradients = sum(each.first + each.x for each in self.pairs)
        return self.kept + self.stack.layers * gradients // 2

    @property
    def turned(self) -> int:
        """The largest saved array, over all layers, that XLA transposes for backward's matmuls."""
        layout = self.config.layout
        gathers = layout.sequence_parallel or layout.has_grid
        return self.pairs[0].x * self.stack.layers if gathers and self.stack.remat == "dots" else 0

    # ---- parameters ----------------------------------------------------------------------------

    @cached_property
    def weights(self) -> float:
        """Elements of a layer's matrices on a device, before ZeRO shards them."""
        return self.stack.stack.held(self.sizes.matrix_shards, self.config.layout.expert_shards)

    def share(self, elements: float) -> int:
        """Bytes of the parameters that hold `elements` of these elements."""
        return int(self.parameters * elements / self.weights)

    @property
    def experts(self) -> int:
        """Bytes of the parameters that are experts."""
        return self.share(self.stack.stack.expert_weights / self.config.layout.expert_shards)

    @property
    def largest(self) -> int:
        """Bytes of the largest matrix of all layers."""
        return self.share(self._largest)

    @property
    def _largest(self) -> float:
        """Elements of a layer's largest matrix on a device."""
        shards, expert_shards = self.sizes.matrix_shards, self.config.layout.expert_shards
        return max(
            part.first_weights / (expert_shards if part.expert_weights else shards)
            for part in self.stack.stack.parts
        )

    @cached_property
    def copies(self) -> int:
        """Copies of parameters that XLA makes for the loop."""
        split = self.shares or not self.config.model.scan_layers
        copied = self.parameters if split else 0
        if self.sizes.has_blocks:  # the output projection, transposed
            turned = sum(part.turned_weights() for part in self.stack.stack.parts)
            copied += self.share(turned / self.sizes.matrix_shards)
        return copied


def loops_of(
    config: Config, state: Mapping[str, int], plan: Stages | None, ends: int
) -> list[Loop]:
    """A device's loops over layers, in forward order.

    Args:
        config: of the run.
        state: as `memory_model.state` gives it.
        plan: of the pipeline; None without one.
        ends: bytes of the parameters outside the layers.
    """
    stacks = memory_model.stacks(config, plan)
    shards = sizes_of(config).matrix_shards, config.layout.expert_shards
    weights = [each.layers * each.stack.held(*shards) for each in stacks]
    layers, names = state["gradients"] - ends, [each.stack.name for each in stacks]
    slots = plan.slots if plan else {}
    return [
        Loop(
            config,
            stack,
            parameters=int(layers * weight / sum(weights)),
            shares=names.count(name) > 1 and plan is None,
            between=slots.get(of_stack("between", name), 0),
        )
        for stack, weight, name in zip(stacks, weights, names, strict=True)
    ]


# ---- memory outside the compiled program ---------------------------------------------------------

MIB = 2**20


class Outside(NamedTuple):
    """Memory that is not an array of the program.

    Args:
        name: its name in reports.
        bytes: its size on one device.
        source: the origin of the figure.
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
    """Memory outside the program on a layout's device; NCCL's only if there are collectives."""
    return OUTSIDE if layout.num_devices > 1 else OUTSIDE[:2]


# ---- the peak of a step --------------------------------------------------------------------------

MARGIN = 0.01  # share of all but the state: gaps between arrays, the scheduler's choices
ID = 4  # bytes of a token's id


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes of a device at the fullest moment of a step.

    Args:
        moment: layers (their backward pass), loss, or update.
        state: parameters and moments that stay on the device between steps, and the batch.
        gathered: whole parameters of a step, and of a layer for backward.
        kept: what layers save for backward.
        mail: what waits for a pipeline's stage.
        gradients: sums over micro-batches, and the current one's.
        working: the tensors of one layer.
        logits: with the head's table.
        copies: XLA's copies of parameters, for a loop over layers or for moving them.
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
        """Bytes of the compiled step, without those outside it (`outside`)."""
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
    """Lists what is alive at a step's moments; fields: those of `peak`, and the parts."""

    config: Config
    state: Mapping[str, int]
    plan: Stages | None
    ends: EndBytes
    loops: list[Loop]

    def moments(self) -> Iterator[Peak]:
        """The moments at which memory may peak."""
        if self.plan:
            yield from self._ticks(self.plan)
        else:
            yield from map(self._backward, range(len(self.loops)))
            yield self._loss()
            yield from self._modules(self._loss())
            yield self._turned()
        if self._is_late:
            yield self._late()
        yield self._update()

    # ---- at several moments --------------------------------------------------------------------

    @cached_property
    def _from_step_to_step(self) -> int:
        """The state in device memory, and the batch: tokens and targets."""
        sizes, train = sizes_of(self.config), self.config.train
        embedded = architecture_of(self.config.padded_model).embedded
        tokens = embedded * sizes.sequences * train.micro_batches
        kept = self.state["parameters"] + self.state["optimizer"]
        kept -= memory_model.hosted(self.config.layout, self.state)
        return kept + 2 * ID * tokens // self.config.layout.sequence_shards

    @cached_property
    def _x(self) -> int:
        """The arrays shaped like x after the layers."""
        streams = architecture_of(self.config.padded_model).streams(sizes_of(self.config))
        return working.ENDS * streams[-1]

    def _gathered(self) -> int:
        """Whole parameters; with one micro-batch, those outside layers are counted elsewhere."""
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
        """Gradient sums over micro-batches, outside pipelines; 0 with one micro-batch."""
        return self.state["gradients"] if self.config.train.micro_batches > 1 else 0

    @property
    def _narrowing(self) -> int:
        """Factor by which layers' gradients are narrower than the state until they are summed."""
        sizes, plan = sizes_of(self.config), self._params
        narrow = plan.narrows or (plan.reduce != "each_layer" and sizes.casts)
        return sizes.master_itemsize // sizes.itemsize if narrow else 1

    def _stacked(self, loops: list[Loop]) -> int:
        """Gradients that loops stack besides sums: a micro-batch's, or shards of the last one's.

        Those of experts that no other device has are added to their sums.
        """
        config, layout, plan = self.config, self.config.layout, self._params
        parameters, adds = sum(each.parameters for each in loops), plan.accumulate == "in_loop"
        if plan.reduce == "last_microbatch" and (adds or config.train.micro_batches == 2):
            experts, copies = sum(each.experts for each in loops), layout.zero_shards // layout.ep
            sent = experts // copies if copies > 1 else 0
            return (parameters - experts) // layout.zero_shards + sent
        return 0 if adds else parameters // self._narrowing

    @cached_property
    def _before_backward(self) -> Peak:
        """The moment when backward begins."""
        state, kept = self._from_step_to_step, sum(each.kept for each in self.loops)
        gathered = self._gathered() + sum(each.gathered for each in self.loops)
        return Peak("loss", state=state, gathered=gathered, kept=kept)

    # ---- without a pipeline --------------------------------------------------------------------

    def _backward(self, number: int) -> Peak:
        """The backward pass of a loop, with earlier loops' saved tensors and later ones' gradients.

        With several micro-batches, zeros for all loops' gradients exist from the first one on.
        """
        before, behind = self.loops[: number + 1], self.loops[0 if self._sums else number :]
        model = self.config.model
        # Unrolled, gradients appear as saved tensors are freed.
        gradients = self._stacked(behind) * model.scan_layers
        # An untied head's table has its own gradient; that of a tied one is accumulated at once.
        table = self.ends.gradient if not (self._sums and model.tie_embeddings) else 0
        return dataclasses.replace(
            self._before_backward,
            moment="layers",
            gathered=self._gathered() + sum(each.gathered for each in before),
            kept=sum(each.kept for each in before),
            gradients=self._sums + gradients + table + self._of_modules,
            working=self.loops[number].working,
            copies=sum(each.copies for each in before),
        )

    def _loss(self) -> Peak:
        """The gradient of the logits, and the head's table and its gradient.

        Where gradients are summed over dp, XLA allocates those of the last loop before this moment.
        """
        early = self.config.layout.sample_shards > 1 and self._params.shards == "none"
        model = self.config.model
        zeros = self._stacked(self.loops) if early and not self._sums else 0
        return dataclasses.replace(
            self._before_backward,
            kept=self._before_backward.kept + memory_model.behind(self.config),
            gradients=self._sums + zeros * model.scan_layers,
            working=self._x,
            logits=self.ends.logits + self.ends.product,
            copies=0 if model.scan_layers else sum(each.copies for each in self.loops),
        )

    def _turned(self) -> Peak:
        """Between both: the loop's gradients exist as zeros, and a saved array exists twice."""
        first = self.loops if self._sums else self.loops[-1:]
        return dataclasses.replace(
            self._before_backward,
            gradients=self._sums + self._stacked(first),
            working=self._x + max(each.turned for each in self.loops),
            logits=2 * self.ends.narrow,
            copies=sum(each.copies for each in self.loops),
        )

    @cached_property
    def _of_modules(self) -> int:
        """Gradients of the layers that run with the heads, before they are summed."""
        sizes = sizes_of(self.config)
        ends = architecture_of(self.config.padded_model).behind
        bytes_of_all = sum(each.end_bytes(sizes).parameters for each in ends if each.layers)
        return 0 if self._sums else bytes_of_all // self._narrowing

    def _modules(self, loss: Peak) -> Iterator[Peak]:
        """The backward pass of each layer that runs with the heads, the last one first.

        What earlier ones save is there, and the logits of their heads and of the model's own.

        loss: the moment before.
        """
        ((remat, _),) = self.config.model.remats(1)
        layers = architecture_of(self.config.padded_model).layers_behind
        saved, many = memory_model.behind(self.config), len(layers)
        for number, stack in enumerate(layers, 1):
            layer = Loop(self.config, DeviceLayers(stack, remat, 1, 1), parameters=0)
            logits = self.ends.logits * number // (many + 1)
            done = self._of_modules * (many - number + 1) // many if not self.plan else 0
            table = self.ends.narrow + self.ends.gradient // (2 * many + 1)
            yield dataclasses.replace(
                loss,
                moment="modules",
                kept=loss.kept - saved * (many - number) // many,
                gradients=loss.gradients + done,
                working=layer.working + self._x,
                logits=logits + table,
            )

    @property
    def _is_late(self) -> bool:
        """True if XLA hides all-reduces behind weight-gradient matmuls of unrolled layers."""
        layout = self.config.layout
        unrolled = not self.config.model.scan_layers and self.plan is None
        return unrolled and layout.batch_shards > 1

    def _late(self) -> Peak:
        """The backward pass of unrolled layers, also of modules, where such matmuls run late."""
        waiting = sum(each.waiting for each in self.loops) + memory_model.behind(self.config)
        return dataclasses.replace(self._before_backward, moment="layers", kept=waiting)

    # ---- a pipeline ----------------------------------------------------------------------------

    def _ticks(self, plan: Stages) -> Iterator[Peak]:
        """A tick: the loss, or a layer. All pools, gradient sums and copies exist."""
        moment = dataclasses.replace(
            self._before_backward,
            mail=memory_model.mail(self.config, plan),
            gradients=self.state["gradients"],
            copies=sum(each.copies for each in self.loops),
        )
        tables = 1 if self.config.model.tie_embeddings else 2
        logits = self.ends.logits + tables * self.ends.narrow
        behind = moment.kept + memory_model.behind(self.config)
        loss = dataclasses.replace(moment, logits=logits, working=self._x, kept=behind)
        yield loss
        yield from self._modules(loss)
        largest = max(each.working for each in self.loops)
        yield dataclasses.replace(moment, moment="layers", working=largest)

    # ---- the update ----------------------------------------------------------------------------

    def _update(self) -> Peak:
        """All gradients, and the largest one's sum, or as much as is back from the host."""
        layout, gradients = self.config.layout, self.state["gradients"]
        moment = Peak("update", state=self._from_step_to_step)
        largest = max(each.largest for each in self.loops)
        if layout.hosts_moments and layout.update_on == "device":
            # One more array, and another where gradients are summed over micro-batches.
            arrays = memory_model.hosted(layout, self.state) // self.state["parameters"]
            shards = layout.zero_shards if self._params.stage == 1 else 1
            more = (arrays + 1 + (self._sums > 0)) * largest // shards
            return dataclasses.replace(moment, gradients=gradients, copies=more)
        comes = layout.hosts_parameters and layout.update_on == "device"
        narrow = (comes or self._params.narrows) and not self._sums
        narrowing = self._narrowing if narrow else 1
        if self._params.shards == "none" and layout.batch_shards > 1:
            return dataclasses.replace(moment, gradients=gradients + largest // narrowing)
        layers = sum(each.parameters for each in self.loops)
        # One parameter arrives, one is updated, one leaves; not all are the largest.
        copies = 5 * largest // 2 if comes and layout.zero == 0 else 0
        gradients += layers // narrowing - layers
        return dataclasses.replace(moment, gradients=gradients, copies=copies)
