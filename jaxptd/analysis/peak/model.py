"""Predicts the peak memory of a device in a training step on GPUs, as XLA compiles it.

A step has a few moments at which its memory may be fullest: the backward pass of each loop over
layers, the loss, and the update. Each is a list of what lives then; the fullest is the peak. The
terms are facts of the program, read off the live ranges of compiled steps; `docs/memory.md`
explains them and has the errors.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property

from jaxptd.analysis import memory_model
from jaxptd.analysis.peak import working
from jaxptd.analysis.peak.ends import Ends, ends_of
from jaxptd.analysis.peak.loops import Loop, loops_of
from jaxptd.analysis.sizes import Sizes
from jaxptd.config import Config
from jaxptd.pipeline.placement import Stages

# Of all but the state, for gaps between arrays and the scheduler's choices: gaps are up to 1.5 % of
# loops over layers, up to 9 % of unrolled layers whose gradients are summed over devices, up to 8 %
# of two micro-batches that are two programs.
MARGIN, UNROLLED_MARGIN, APART_MARGIN = 0.01, 0.05, 0.08
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
        """Bytes of the compiled step, without what is outside of it (`outside.py`)."""
        return sum(self.parts.values())


def peak(config: Config, state: Mapping[str, int], plan: Stages | None) -> Peak:
    """Predicts the peak memory of a device.

    Args:
        config: of the run.
        state: as `memory_model.state` gives it.
        plan: of the pipeline; None without one.
    """
    ends = ends_of(config)
    step = _Step(config, state, plan, ends, loops_of(config, state, plan, ends.parameters))
    found = max(step.moments(), key=lambda each: each.total)
    return dataclasses.replace(found, margin=round(step.margin * (found.total - found.state)))


@dataclasses.dataclass(frozen=True)
class _Step:
    """Lists what lives at the moments of a step; the fields are those of `peak`, and the parts."""

    config: Config
    state: Mapping[str, int]
    plan: Stages | None
    ends: Ends
    loops: list[Loop]

    def moments(self) -> Iterator[Peak]:
        """The moments at which memory may be fullest."""
        if self.plan:
            yield from self._ticks(self.plan)
        else:
            yield from map(self._backward, range(len(self.loops)))
            yield self._loss()
            yield self._turned()
        if self.late_products:
            yield self._late()
        yield self._update()

    @property
    def margin(self) -> float:
        """The share of all but the state for gaps."""
        if self._apart:
            return APART_MARGIN
        if self.late_products:
            return UNROLLED_MARGIN
        return MARGIN

    # ---- at several moments --------------------------------------------------------------------

    @cached_property
    def _from_step_to_step(self) -> int:
        """The state, where it is the device's, and the batch: tokens and targets."""
        sizes, train = Sizes(self.config), self.config.train
        tokens = sum(sizes.inventory.embedded) * sizes.sequences * train.micro_batches
        own = self.state["parameters"] + self.state["optimizer"]
        own -= memory_model.hosted(self.config.layout, self.state)
        return own + 2 * ID * tokens // self.config.layout.cp

    def _gathered(self) -> int:
        """Whole parameters; with one micro-batch those outside the layers are counted elsewhere.

        Layers that a loop gathers have their shards on the device until then, also a host's.
        """
        gathered = self.state["gathered"]
        if self.plan or self._sums or self.config.zero == 0:
            return gathered
        own = self.config.holds_blocks and "optimizer" in self.config.layout.offloaded
        shards = sum(each.parameters for each in self.loops) if own else 0
        return gathered - min(gathered, self.ends.gathered) + shards

    @property
    def _sums(self) -> int:
        """Sums of gradients over micro-batches, outside of pipelines; 0 with one."""
        return self.state["gradients"] if self.config.train.micro_batches > 1 else 0

    @property
    def _narrowing(self) -> int:
        """Times that gradients of layers are narrower than the state, until they are summed."""
        sizes = Sizes(self.config)
        narrow = self.config.narrows or (self.config.zero < 2 and working.casts(self.config))
        return sizes.master_itemsize // sizes.itemsize if narrow else 1

    @property
    def _apart(self) -> bool:
        """True if a last micro-batch sends shards, and the gradients of the one before are sums."""
        return self.config.scatters_last and self.config.train.micro_batches == 2

    def _stacked(self, loops: list[Loop]) -> int:
        """Gradients that loops stack beside sums: a micro-batch's, or shards, see `_apart`."""
        if self.config.sums_in_loops:
            return 0
        shards = self.config.layout.dp * self.config.layout.cp
        return sum(x.parameters for x in loops) // (shards if self._apart else self._narrowing)

    @property
    def _table(self) -> int:
        """The gradient of the head's table, where no sum over micro-batches takes it at once."""
        return 0 if self._sums and not self.config.layout.has_grid else self.ends.gradient

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
        late = self.ends.narrow if self._sums and not model.tie_embeddings else 0
        waiting = max(self.ends.logits - self._table, 0) if self._logits_wait else 0
        return dataclasses.replace(
            self._before_backward,
            moment="layers",
            gathered=self._gathered() + sum(each.gathered for each in before),
            kept=sum(each.kept for each in before),
            gradients=self._sums + gradients + self._table + late,
            working=self.loops[number].working,
            logits=waiting,
            copies=sum(each.copies for each in before),
        )

    @property
    def _logits_wait(self) -> bool:
        """True if XLA hides a sum over devices behind the product for the table's gradient.

        It then runs after the layers' backward pass, and the gradient of the logits waits for it.
        With several micro-batches, and with ZeRO, it was not seen to do so.
        """
        layout, tied = self.config.layout, self.config.model.tie_embeddings
        over_tokens = layout.dp > 1 or (layout.cp > 1 if tied else layout.sequence_parallel)
        has_sum = (self.config.zero == 0 and over_tokens) or (tied and layout.has_grid)
        return not self._sums and has_sum

    def _loss(self) -> Peak:
        """The gradient of the logits, and that of the table, both also in 16 bits."""
        model = self.config.model
        zeros = sum(each.parameters for each in self.loops) // self._narrowing
        zeros *= self._allocates_early
        return dataclasses.replace(
            self._before_backward,
            gradients=self._sums + zeros + self._table,
            working=working.ENDS * self.ends.x + self._panels(),
            logits=self.ends.logits + 2 * self.ends.narrow,
            copies=0 if model.scan_layers else sum(each.copies for each in self.loops),
        )

    @property
    def _allocates_early(self) -> bool:
        """True if XLA allocates a loop's gradients beside a sum over devices in the loss."""
        layout = self.config.layout
        alone = layout.dp * layout.cp == 1 or layout.tp > 1 or layout.has_grid
        return self.config.model.scan_layers and not (alone or self._sums or self.config.prefetches)

    def _panels(self) -> int:
        """On a grid the last layer's backward is not in the loop, and begins before."""
        has_grid = self.config.layout.has_grid
        return 2 * max(each.moving for each in self.loops[-1].pairs) if has_grid else 0

    def _turned(self) -> Peak:
        """Between both: the loop's gradients are there, as zeros, and a kept array twice."""
        first = self.loops if self._sums else self.loops[-1:]
        return dataclasses.replace(
            self._before_backward,
            gradients=self._sums + self._stacked(first),
            working=working.ENDS * self.ends.x + max(each.turned for each in self.loops),
            logits=2 * self.ends.narrow,
            copies=sum(each.copies for each in self.loops),
        )

    @property
    def late_products(self) -> bool:
        """True if XLA hides sums over devices behind the products for gradients of all layers.

        It does so with unrolled layers, whose products then wait for the end of backward.
        """
        layout = self.config.layout
        unrolled = not self.config.model.scan_layers and self.plan is None
        return unrolled and layout.dp * layout.cp > 1

    def _late(self) -> Peak:
        """The end of backward in unrolled layers: what all products for their gradients take.

        Where nothing is computed again to hide sums behind, the table's product waits too.
        """
        waiting = sum(each.waiting for each in self.loops)
        logits = self.ends.logits if self.config.model.remat == "none" else 0
        found = dataclasses.replace(self._before_backward, moment="layers", logits=logits)
        return dataclasses.replace(found, kept=waiting)

    # ---- a pipeline ----------------------------------------------------------------------------

    def _ticks(self, plan: Stages) -> Iterator[Peak]:
        """A tick: the loss, or a layer. All pools, sums of gradients and copies are there."""
        found = dataclasses.replace(
            self._before_backward,
            mail=memory_model.mail(self.config, plan),
            gradients=self.state["gradients"],
            copies=sum(each.copies for each in self.loops),
        )
        tables = 1 if self.config.model.tie_embeddings else 2
        logits = self.ends.logits + tables * self.ends.narrow
        yield dataclasses.replace(found, logits=logits, working=working.ENDS * self.ends.x)
        largest = max(each.working for each in self.loops)
        yield dataclasses.replace(found, moment="layers", working=largest)

    # ---- the update ----------------------------------------------------------------------------

    def _update(self) -> Peak:
        """All gradients, and the sum of the largest, or what is back from the host of it."""
        layout, gradients = self.config.layout, self.state["gradients"]
        found = Peak("update", state=self._from_step_to_step)
        largest = max(each.largest for each in self.loops)
        if layout.hosts_moments and layout.update_on == "device":
            # One array more, and one where gradients are summed over micro-batches.
            arrays = memory_model.hosted(layout, self.state) // self.state["parameters"]
            shards = layout.dp * layout.cp if layout.zero == 1 else 1
            more = (arrays + 1 + (self._sums > 0)) * largest // shards
            return dataclasses.replace(found, gradients=gradients, copies=more)
        narrowing = self._narrowing if self.config.narrows and not self._sums else 1
        if self.config.zero == 0 and layout.dp * layout.cp > 1:
            return dataclasses.replace(found, gradients=gradients + largest // narrowing)
        layers = sum(each.parameters for each in self.loops)
        return dataclasses.replace(found, gradients=gradients - layers + layers // narrowing)
