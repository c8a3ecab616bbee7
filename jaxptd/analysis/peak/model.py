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
    return dataclasses.replace(found, margin=round(MARGIN * (found.total - found.state)))


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
        if self._is_late:
            yield self._late()
        yield self._update()

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
        """Whole parameters; with one micro-batch those outside the layers are counted elsewhere."""
        gathered = self.state["gathered"]
        if self.plan or self._sums or self.config.zero == 0:
            return gathered
        return gathered - min(gathered, self.ends.gathered)

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

    def _stacked(self, loops: list[Loop]) -> int:
        """Gradients that loops stack beside sums: a micro-batch's, or shards of the last one's."""
        config, layout = self.config, self.config.layout
        parameters = sum(each.parameters for each in loops)
        only_sums = config.sums_in_loops or config.train.micro_batches == 2
        if config.scatters_last and only_sums:
            return parameters // (layout.dp * layout.cp)
        return 0 if config.sums_in_loops else parameters // self._narrowing

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
        model, early = self.config.model, self.config.layout.dp > 1 and self.config.zero == 0
        zeros = self._stacked(self.loops) if early and not self._sums else 0
        return dataclasses.replace(
            self._before_backward,
            gradients=self._sums + zeros * model.scan_layers,
            working=working.ENDS * self.ends.x,
            logits=self.ends.logits + self.ends.product,
            copies=0 if model.scan_layers else sum(each.copies for each in self.loops),
        )

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
            shards = layout.dp * layout.cp if self.config.zero == 1 else 1
            more = (arrays + 1 + (self._sums > 0)) * largest // shards
            return dataclasses.replace(found, gradients=gradients, copies=more)
        comes = layout.hosts_parameters and layout.update_on == "device"
        narrow = (comes or self.config.narrows) and not self._sums
        narrowing = self._narrowing if narrow else 1
        if self.config.zero == 0 and layout.dp * layout.cp > 1:
            return dataclasses.replace(found, gradients=gradients + largest // narrowing)
        layers = sum(each.parameters for each in self.loops)
        # Of parameters one comes, one is updated and one goes; not all are the largest.
        copies = 5 * largest // 2 if comes and layout.zero == 0 else 0
        gradients += layers // narrowing - layers
        return dataclasses.replace(found, gradients=gradients, copies=copies)
