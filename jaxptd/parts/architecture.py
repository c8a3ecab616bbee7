"""The parts of a model in the order in which activations pass them.

Sizes are those of the whole model, without padding. Letters: D model, T tokens in a sequence, V
vocabulary, L layers. Patches of an image count as tokens.
"""

import dataclasses
from collections.abc import Iterator
from functools import cached_property

from jaxptd.config.block import NormOrder
from jaxptd.costs.collective import Collective
from jaxptd.parts.ends import End, EndBytes, Norm
from jaxptd.parts.parameters import Named, Sharding, inside
from jaxptd.parts.part import Part
from jaxptd.parts.scenario import RECOMPUTED, WHOLE_PART, Recomputed, Scenario
from jaxptd.parts.sizes import Sizes
from jaxptd.shapes import ParamShape


@dataclasses.dataclass(frozen=True)
class Stack:
    """Identical layers: for each pair of matmuls its norms and a residual addition after it.

    Where the model's layers differ in shape, a layer of the stack is a period of them.

    Args:
        name: the stack's name.
        layers: L.
        parts: a layer's parts in order; of a period, those of its layers in turn.
        statistics: each norm's, as in `Norm`.
        norm_order: what the norms apply to, as in `BlockOptions`.
        parallel: whether all parts read one norm of the layer's input, and none another's output.
        updates: the array of x that it updates, by a name that other stacks may share; None: one of
            its own.
        period: how many layers of the model one of the stack is.
    """

    name: str
    layers: int
    parts: tuple[Part, ...]
    statistics: int
    norm_order: NormOrder = "pre"
    parallel: bool = False
    updates: str | None = None
    period: int = 1

    @cached_property
    def in_turn(self) -> tuple["Stack", ...]:
        """The layers of a period, each as a stack of such layers; the stack itself without one."""
        if self.period == 1:
            return (self,)
        each = len(self.parts) // self.period
        starts = range(0, len(self.parts), each)
        return tuple(
            dataclasses.replace(self, parts=self.parts[start : start + each], period=1)
            for start in starts
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The prefixes of the names of a period's layers; an empty one without a period."""
        return tuple(f"layer_{i}." for i in range(self.period)) if self.period > 1 else ("",)

    @property
    def norm(self) -> Norm:
        """The norm of a pair of matmuls."""
        return Norm(self.hidden, self.statistics)

    @property
    def norms(self) -> int:
        """Number of norms in a layer."""
        if self.parallel:
            return 1
        return len(self.parts) * (2 if self.norm_order == "both" else 1)

    def has_norm(self, number: int) -> bool:
        """True if this part has norms of its own."""
        return number == 0 or not self.parallel

    @property
    def norms_outputs(self) -> bool:
        """True if norms apply to the pairs' outputs, before these are added."""
        return self.norm_order in ("output", "both")

    @property
    def read_inside(self) -> int:
        """Number of first parts that compute what later parts of the layer read."""
        return 0 if self.parallel else len(self.parts) - 1

    @cached_property
    def tokens(self) -> int:
        """Tokens of a sequence that its layers update."""
        return next(part.sequence for part in self.parts if part.sequence)

    @property
    def hidden(self) -> int:
        """D of its layers."""
        return self.parts[0].hidden

    @cached_property
    def weights(self) -> int:
        """Elements of a layer's matrices."""
        return sum(part.weights for part in self.parts)

    def held(self, shards: int, expert_shards: int) -> float:
        """Elements of a layer's matrices on a device; see `Part.held`."""
        return sum(part.held(shards, expert_shards) for part in self.parts)

    @property
    def expert_weights(self) -> int:
        """Elements of a layer's experts."""
        return sum(part.expert_weights for part in self.parts)

    @property
    def multiplications(self) -> int:
        """Multiplications per sequence with the weights of all layers, without adapters."""
        return self.layers * sum(part.multiplications(self.tokens) for part in self.parts)

    @property
    def of_adapters(self) -> int:
        """Multiplications per sequence with the weights of all layers' adapters."""
        return self.layers * sum(part.adapter_multiplications(self.tokens) for part in self.parts)

    @property
    def score_flops(self) -> int:
        """FLOPs per sequence of attention's scores in all layers, forward."""
        return int(self.layers * self.tokens * sum(part.score_flops for part in self.parts))

    # ---- images --------------------------------------------------------------------------------

    @property
    def of_images(self) -> bool:
        """True if its tokens are patches of images."""
        return any(part.of_images for part in self.parts)

    def in_strips(self, devices: int) -> bool:
        """True if this many devices share images in strips; otherwise each holds whole ones."""
        return all(part.in_strips(devices) for part in self.parts)

    def samples(self, sizes: Sizes, rows: int) -> int:
        """Samples to which a device's `rows` tokens belong: whole sequences or shards of them.

        A sequence's tokens may be sharded over more axes than cp; an image only over cp, or not at
        all.
        """
        if not self.of_images:
            return sizes.sequences
        cp = sizes.config.layout.cp
        return rows * (cp if self.in_strips(cp) else 1) // self.tokens

    # ---- parameters ----------------------------------------------------------------------------

    def parameters(self, sharding: Sharding) -> Named:
        """The parameters of all layers, `[L, ..]`: each part's norm and matmuls."""
        for name, info in self.of_a_layer(sharding):
            yield name, self._stacked(info)

    def of_a_layer(self, sharding: Sharding) -> Named:
        """The parameters of a layer."""
        if self.period > 1:
            for name, layer in zip(self.names, self.in_turn, strict=True):
                yield from inside(name.removesuffix("."), layer.of_a_layer(sharding))
            return
        for number, part in enumerate(self.parts):
            if self.has_norm(number):
                name = "norm" if self.parallel else f"{part.name}_norm"
                yield from inside(name, self.norm.parameters(sharding))
            if self.norm_order == "both":
                yield from inside(f"{part.name}_output_norm", self.norm.parameters(sharding))
            yield from inside(part.name, part.parameters(sharding))

    def _stacked(self, info: ParamShape) -> ParamShape:
        """The stacked parameter of all layers."""
        return dataclasses.replace(
            info,
            shape=(self.layers, *info.shape),
            stored_shape=(self.layers, *info.stored_shape),
            spec=(None, *info.spec),
            stack=self.name,
            matrix="s" + info.matrix if info.matrix else "",
        )

    # ---- bytes sent ----------------------------------------------------------------------------

    def collectives(self, step: Scenario) -> Iterator[Collective]:
        """Collectives over tp, or on a grid; step: with any sequence lengths."""
        if self.period > 1:
            for layer in self.in_turn:
                yield from layer.collectives(step)
            return
        step, has_grid = step.with_tokens(self.tokens, self.hidden), step.config.layout.has_grid
        for again, layers in self._recomputed(step):
            times = step.micro_batches * layers
            inner = again._replace(last_product=again.products)
            for number, part in enumerate(self.parts):
                of_part = part.on_grid if has_grid else part.on_tp
                yield from of_part(step, inner if number < self.read_inside else again, times)
            if has_grid:
                norms = times * self.norms
                forward = (1 + again.products) * norms
                yield from self.norm.on_grid(step, forward=forward, backward=norms)

    def along_cp(self, step: Scenario) -> Iterator[Collective]:
        """Collectives along cp and its ring; step: with any sequence lengths."""
        step = step.with_tokens(self.tokens, self.hidden)
        for again, layers in self._recomputed(step):
            for part in self.parts:
                yield from part.along_cp(step, again, step.micro_batches * layers)

    def _recomputed(self, step: Scenario) -> list[tuple[Recomputed, int]]:
        """Groups of layers: (what backward repeats, number of layers)."""
        if step.plan and step.plan.recompute:
            return [(WHOLE_PART, self.layers)]
        counts = step.plan.stacks[self.name] if step.plan else (self.layers,)
        remats = (each for count in counts for each in step.config.model.remats(count))
        rows = [(step.gathering(RECOMPUTED[remat]), layers) for remat, layers in remats]
        if self.norm_order == "pre":
            return rows
        # The last residual sum, or the last output, enters a norm of the same layer.
        return [(again._replace(last_product=again.products), n) for again, n in rows]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The parts of a model.

    Args:
        hidden: D.
        before: the end that produces the residual stream.
        stacks: in the order in which activations pass them.
        behind: heads, one for each term of the loss with its own logits; for a model of images, all
            that is outside its levels.
    """

    hidden: int
    before: tuple[End, ...]
    stacks: tuple[Stack, ...]
    behind: tuple[End, ...]

    @property
    def ends(self) -> tuple[End, ...]:
        """All parts outside the stacks."""
        return (*self.before, *self.behind)

    @property
    def of_images(self) -> bool:
        """True for a model of images."""
        return self.stacks[0].of_images

    @property
    def embedded(self) -> int:
        """Tokens that are looked up per sample, with its source."""
        return sum(end.embedded for end in self.ends)

    @property
    def flops(self) -> int:
        """FLOPs of a step per sequence, with its source.

        Six per token and matmul weight, plus three times the FLOPs of scores. With adapters four
        per weight that does not train.
        Source: Chowdhery et al., arXiv 2204.02311, appendix B.
        """
        tokens, stacks = self.stacks[-1].tokens, (*self.stacks, *self.layers_behind)
        weights = sum(end.multiplications(tokens) for end in self.ends)
        weights += sum(stack.multiplications for stack in stacks)
        adapters = sum(stack.of_adapters for stack in stacks)
        scores = sum(stack.score_flops for stack in stacks)
        return (4 if adapters else 6) * weights + 6 * adapters + 3 * scores

    @property
    def layers_behind(self) -> list[Stack]:
        """The layers that run with the heads."""
        return [layer for end in self.behind for layer in end.layers]

    def parameters(self, sharding: Sharding, vocab: int) -> Named:
        """Every parameter of a text model, with the layers of a stack as one; vocab: padded V.

        Parameters of a kind that is named alike in all models have the model's names.
        """
        for end in self.before:
            yield from end.parameters(sharding, vocab)
        for stack in self.stacks:
            yield from inside(stack.name, stack.parameters(sharding))
            for part in stack.parts:
                yield from inside("common", part.common_parameters(sharding, stack.name))
        for end in self.behind:
            yield from end.parameters(sharding, vocab)

    def end_bytes(self, sizes: Sizes) -> EndBytes:
        """The bytes that a device holds outside the layers."""
        return EndBytes.of_all(end.end_bytes(sizes) for end in self.ends)

    def at_ends(self, step: Scenario) -> Iterator[Collective]:
        """Collectives of tables, heads, the loss, and all else outside layers."""
        return (each for end in self.ends for each in end.collectives(step))

    def streams(self, sizes: Sizes) -> list[int]:
        """Bytes of each array of x: a micro-batch's residual stream on a device.

        Each stack updates one array, as wide as the model; ends may need others.
        """
        updated = {stack.updates or stack.name: stack.tokens for stack in self.stacks}
        others = [each for end in self.ends for each in end.streams(sizes)]
        return [sizes.with_tokens(tokens).stream for tokens in updated.values()] + others
