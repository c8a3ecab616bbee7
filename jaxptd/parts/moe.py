"""A mixture of experts: its description and costs. The layer is `layers/moe.py`.

Tokens of all devices along ep are gathered, each device adds up what its own experts make of them,
and a reduce-scatter brings the sums back. No message depends on the router's choice, so none is
dropped and bytes are known before a step runs.

Letters: b sequences of a micro-batch on one device, T tokens, D model, F hidden units of an expert,
E experts, K of them for a token.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

from jaxptd.config import ModelConfig
from jaxptd.context_parallel import Imported
from jaxptd.costs import kernels
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.costs.kept import MOST, SOME, Kept, by
from jaxptd.costs.program import Implementation, Work
from jaxptd.costs.terms import Term
from jaxptd.layout import SEQUENCE_AXES, Axis, Layout
from jaxptd.parts.ends import End
from jaxptd.parts.mlp import MLPShape
from jaxptd.parts.parameters import Named, Sharding, inside, vector
from jaxptd.parts.part import BACKWARD, FORWARD, Part, Product
from jaxptd.parts.scenario import Recomputed, Scenario
from jaxptd.parts.sizes import Sizes
from jaxptd.parts.working import PairBytes
from jaxptd.shapes import ParamShape

CHOICE_BYTES = 4  # of an expert's number
# Bytes of the router's kernels per score and per sorted pair, and their number: float32 scores
# written, read for the largest and for the loss; radix sort of 32-bit numbers with their places.
SCORES, SORTED, CHOOSING = 24, 64, 12


class ExpertBytes(PairBytes):
    """The bytes of experts, of which nothing is saved: backward computes them again."""

    @property
    def in_8_bits(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class MoEShape(Part):
    """A router and the experts that it chooses from; optionally an MLP that all tokens pass.

    Args:
        hidden: D.
        size: F.
        gated: whether experts have a gate.
        experts: E.
        chosen: K.
        shared: the MLP of all tokens, or None.
        shared_gate: whether a sigmoid of its own scales that MLP's output.
        router_bias: whether router logits have a bias.
        bias: whether both matmuls of an expert, and of the MLP of all tokens, have a bias.
        counts_sequences: whether the loss depends on the loads of each sequence.
        chunk: rows of a chunk, as a multiple of balanced experts'.
    """

    hidden: int
    size: int
    gated: bool
    experts: int
    chosen: int
    shared: MLPShape | None = None
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    counts_sequences: bool = False
    chunk: float = 1.25

    layer = Imported("jaxptd.layers.moe", "MoE")
    name: ClassVar[str] = "mlp"
    title: ClassVar[str] = "the experts"
    first_title: ClassVar[str] = "experts"
    routes: ClassVar[bool] = True

    @classmethod
    def of(cls, model: ModelConfig) -> Self:
        """The experts of a model's sparse layers."""
        moe, gated, bias = model.moe, model.block.gated, model.block.linear_bias == "all"
        assert moe is not None
        width, shared = moe.shared_ffn_hidden_size, None
        if width:
            own = MLPShape(model.hidden_size, width, gated, bias)
            shared = dataclasses.replace(own, lora=model.lora, path="mlp.shared")
        return cls(
            model.hidden_size,
            moe.ffn_hidden_size or model.mlp_size,
            gated,
            moe.num_experts,
            moe.top_k,
            shared=shared,
            shared_gate=moe.shared_gate,
            router_bias=moe.router_bias,
            bias=bias,
            counts_sequences=moe.balance_loss > 0,
            chunk=moe.chunk,
        )

    # ---- sizes ---------------------------------------------------------------------------------

    @property
    def expert(self) -> MLPShape:
        """One expert."""
        return MLPShape(self.hidden, self.size, self.gated, self.bias)

    @property
    def columns(self) -> int:
        return self.experts * self.expert.columns

    @property
    def inner(self) -> int:
        return self.experts * self.size

    @property
    def weights(self) -> int:
        router = self.hidden * (self.experts + self.shared_gate)
        shared = self.shared.weights if self.shared else 0
        return super().weights + router + shared

    @property
    def expert_weights(self) -> int:
        return self.experts * self.expert.weights

    def is_shared(self, expert_slices: int) -> bool:
        return self.shared is not None or expert_slices > 1

    def copies_sent(self, places: int | None) -> float:
        if places is None:
            return float(self.chosen)
        others = self.experts - self.experts // places
        missed = (max(0, others - i) / (self.experts - i) for i in range(self.chosen))
        return places * (1 - math.prod(missed))

    def multiplications(self, tokens: int) -> int:
        """Multiplications by the experts that each token passes, not by all."""
        idle = (self.experts - self.chosen) * self.expert.weights
        return tokens * (self.weights - idle)

    def first(self, sizes: Sizes) -> int:
        return self.expert.first(sizes)

    def second(self, sizes: Sizes) -> int:
        return self.expert.second(sizes)

    def splits(self, layout: Layout) -> bool:
        return self.expert.splits(layout) and (self.shared is None or self.shared.splits(layout))

    def rows(self, tokens: int, layout: Layout) -> tuple[int, int]:
        """Rows of a device's experts at most, and rows of a chunk.

        Args:
            tokens: of a micro-batch on one device, b*T/cp.
            layout: the run's.
        """
        devices = layout.expert_devices
        at_once = tokens // layout.tp if layout.collective_matmul else tokens * layout.ep
        most = at_once * min(self.chosen, self.experts // devices)
        return most, min(most, math.ceil(self.chunk * at_once * self.chosen / devices))

    # ---- parameters ----------------------------------------------------------------------------

    def parameters(self, sharding: Sharding) -> Named:
        yield from inside("router", self.router_parameters(sharding))
        yield from inside("up", self.first_parameters(sharding))
        yield from inside("down", self.second_parameters(sharding))
        if self.shared:
            yield from inside("shared", self.shared.parameters(sharding))
        if self.shared_gate:
            yield from inside("shared_gate", self.gate_parameters(sharding))

    def router_parameters(self, sharding: Sharding) -> Named:
        """`w[D, E]`, a bias of logits if there is one, and the bias that only chooses.

        The gradient of the last one counts the tokens of each expert, see `ParamShape.counts`.
        """
        shape, spec = (self.hidden, self.experts), (None, None)
        yield "w", ParamShape(shape, shape, spec, decay=True, matrix="rc")
        bias = ParamShape((self.experts,), (self.experts,), (None,), decay=False)
        if self.router_bias:
            yield "b", bias
        yield "load_bias", dataclasses.replace(bias, counts=True)

    def gate_parameters(self, sharding: Sharding) -> Named:
        """`w[D, 1]` of the sigmoid that scales the shared MLP."""
        yield (
            "w",
            ParamShape((self.hidden, 1), (self.hidden, 1), (None, None), decay=True, cast=True),
        )

    def first_parameters(self, sharding: Sharding) -> Named:
        """The first matmuls of all experts."""
        yield from self._of_all(sharding, dict(self.expert.up.parameters(sharding)))

    def second_parameters(self, sharding: Sharding) -> Named:
        """The second matmuls of all experts.

        Devices that share an expert add up what their hidden units make, so each adds a slice of
        the bias: `b[E, D]` is sharded over D as hidden units are.
        """
        own = dict(self.expert.down.parameters(sharding))
        if self.bias:
            spec, padded = sharding.axes.inner_spec(1, 0), sharding.padded(self.hidden)
            own["b"] = vector((self.hidden,), spec, (padded,))
        yield from self._of_all(sharding, own)

    def _of_all(self, sharding: Sharding, parameters: Mapping[str, ParamShape]) -> Named:
        """Parameters of one expert -> those of all, stacked and split over devices."""
        axes = sharding.axes.experts
        for name, info in parameters.items():
            if sharding.axes.inner in axes:  # whole experts
                spec = (None,) * len(info.spec)
                info = dataclasses.replace(info, stored_shape=info.shape, spec=spec)
            yield (
                name,
                dataclasses.replace(
                    info,
                    shape=(self.experts, *info.shape),
                    stored_shape=(self.experts, *info.stored_shape),
                    spec=(axes if len(axes) > 1 else axes[0], *info.spec),
                    matrix="s" + info.matrix if info.matrix else "",
                ),
            )

    # ---- bytes ---------------------------------------------------------------------------------

    def taken(self, sizes: Sizes) -> int:
        """Own tokens, which backward gathers again."""
        return sizes.stream

    def kept(self, sizes: Sizes) -> Iterator[Kept]:
        """The choices for own tokens; all that experts compute is computed again."""
        always = MOST | by("full")
        yield Kept("chosen experts", sizes.stream_rows * self.chosen * CHOICE_BYTES, always)
        if self.counts_sequences:
            loads = sizes.sequences * self.experts * sizes.master_itemsize
            yield Kept("loads of sequences", loads, always)
        if self.shared:
            # Where it is not gathered whole, a policy by names saves x for each user of it.
            copies = SOME if sizes.copies_taken else by("attention")
            yield Kept("input of the shared up product", sizes.taken, copies)
            yield from self.shared.kept(sizes)

    def pair_bytes(self, sizes: Sizes) -> PairBytes:
        """Bytes of a chunk of rows, and of x of all devices along ep, or of two in a ring."""
        layout = sizes.config.layout
        rows, slices = self.rows(sizes.tokens, layout)[1], layout.tp * layout.ep
        whole = sizes.activations * layout.ep
        if layout.collective_matmul:
            whole = 2 * sizes.activations // layout.tp
        unit = rows * sizes.itemsize * layout.expert_devices // slices
        return ExpertBytes.of(
            self,
            sizes,
            taken=whole,
            first=unit * self.first(sizes),
            second=unit * self.second(sizes),
            gradient=whole,
            moving=2 * whole,
        )

    # ---- bytes sent ----------------------------------------------------------------------------

    def on_tp(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Collectives over ep and tp around the experts, of x, choices and weights.

        Forward gathers x, and reduce-scatters the sums of experts' outputs; backward their
        conjugates, after another gather of x. Without sequence parallelism tp has all-reduces. With
        collective matmul tokens and sums hop from device to device instead.
        """
        sizes, layout = step.sizes, step.config.layout
        x, chosen = sizes.activations, sizes.tokens * self.chosen
        weights, choices = chosen * sizes.master_itemsize, chosen * CHOICE_BYTES
        runs = FORWARD + BACKWARD + again.last_product  # of the experts, each after gathers
        gathered = runs + 1  # x, and the gradient of the output
        ends = runs  # the output, again, and the gradient of x
        sums = BACKWARD  # the weights' gradients
        moves = (
            (ALL_GATHER, gathered + 2 * runs, gathered * x + runs * (choices + weights)),
            (REDUCE_SCATTER, ends + sums, ends * x + sums * weights),
        )
        hops, ring = times * (layout.ep * layout.tp - 1), (Axis.EP, Axis.TP)
        for kind, messages, moved in moves:
            if layout.collective_matmul:
                yield Collective(PERMUTE, ring, hops * messages, hops * moved // layout.tp)
                continue
            yield Collective(kind, (Axis.EP,), times * messages, times * layout.ep * moved)
            if layout.sequence_parallel:
                yield Collective(kind, (Axis.TP,), times * messages, times * moved)
        if not layout.sequence_parallel:
            for messages, size in ((ends, x), (sums, weights)):
                yield Collective(ALL_REDUCE, (Axis.TP,), times * messages, times * messages * size)
        if self.counts_sequences:
            counts = sizes.sequences * self.experts * sizes.master_itemsize
            over = (*SEQUENCE_AXES, *(Axis.TP,) * layout.sequence_parallel)
            yield Collective(ALL_REDUCE, over, times, times * counts)
        if self.shared:
            yield from self.shared.on_tp(step, again, times)

    # ---- seconds -------------------------------------------------------------------------------

    def products(self, work: Work) -> Iterator[Product]:
        """Matmuls of the device whose experts have most rows, each with as many."""
        yield Product("router", work.tokens, self.hidden, self.experts, wide=True)
        yield from self._of_experts(work)
        if self.shared:
            yield from self.shared.products(work)

    def remade(self, work: Work) -> Iterator[Product]:
        """Hidden units, where backward computes them again."""
        if work.implementation.experts_again:
            yield next(self._of_experts(work))

    def _of_experts(self, work: Work) -> Iterator[Product]:
        slices = work.parallelism.expert_slices
        own = max(1, self.experts // work.parallelism.expert_devices)
        rows = max(1, round(self._rows(work) / own))
        columns, apart = self.expert.columns // slices, work.implementation.experts_again
        yield Product("experts in", rows, self.hidden, columns, own, apart, routed=True)
        yield Product(
            "experts out", rows, self.size // slices, self.hidden, own, apart, routed=True
        )

    def _rows(self, work: Work) -> float:
        """Pairs of a token and an expert on the busiest device."""
        parallelism = work.parallelism
        share = parallelism.expert_slices / parallelism.inner
        return work.tokens * self.chosen * share * parallelism.imbalance

    def _added(self, work: Work) -> float:
        """Tokens for which a device adds up rows: those of all devices, if they were gathered."""
        parallelism = work.parallelism
        share = parallelism.expert_slices / parallelism.inner
        gathered = parallelism.expert_devices if parallelism.dispatch == "allgather" else 1
        return work.tokens * share * gathered

    def _activation(self, work: Work) -> float:
        """Bytes that the activation of a device's rows moves."""
        units = self.expert.moved_forward(work.implementation)
        return self._rows(work) * units / work.parallelism.expert_slices

    def routing_forward(self, work: Work) -> list[Term]:
        """Scores, sorted pairs, rows gathered, their activation, and each token's sum of rows."""
        rows, added = self._rows(work) * self.hidden, self._added(work) * self.hidden
        moves = 4 * rows + self._activation(work) + 2 * (rows + added)
        moves += self._sums_of_chunks(work, added)
        return [self._choosing(work), self._moved(work, moves, 4, "rows of experts forward")]

    def routing_backward(self, work: Work) -> list[Term]:
        """The gradients of these; rows and their activation again where they are not kept."""
        rows, added = self._rows(work) * self.hidden, self._added(work) * self.hidden
        units = self.expert.moved_backward(work.implementation)
        moves = 4 * rows + 2 * (rows + added)
        moves += self._rows(work) * units / work.parallelism.expert_slices
        if work.implementation.experts_again:
            moves += 4 * rows + self._activation(work)
            matrices = self.expert_weights / work.parallelism.expert_shards
            moves += self._sums_of_chunks(work, added + matrices)
        return [self._choosing(work), self._moved(work, moves, 6, "rows of experts backward")]

    def _sums_of_chunks(self, work: Work, elements: float) -> float:
        """Bytes of sums in float32, if the busiest device needs several chunks.

        Zeros are written, each chunk reads and writes the sum, and the last form is 16 bits.
        """
        parallelism = work.parallelism
        most = min(self.chosen * parallelism.expert_devices, self.experts) / self.chosen
        chunks = math.ceil(parallelism.imbalance / self.chunk)
        if not work.implementation.experts_again or chunks == 1 or self.chunk >= most:
            return 0.0
        return elements * (4 + 8 * chunks + 6)

    def _moved(self, work: Work, moves: float, number: int, name: str) -> Term:
        term = kernels.moved(work.accelerator, moves, number).named(name)
        return term._replace(seconds=term.seconds / work.implementation.expert_pace)

    def _choosing(self, work: Work) -> Term:
        """Passes over scores in float32, and a sort of the pairs' numbers."""
        pairs = self._added(work) * self.chosen
        moves = SCORES * work.tokens * self.experts + SORTED * pairs
        return kernels.moved(work.accelerator, moves, CHOOSING).named("router")

    def moved_forward(self, implementation: Implementation) -> int:
        return self.shared.moved_forward(implementation) if self.shared else 0

    def moved_backward(self, implementation: Implementation) -> int:
        return self.shared.moved_backward(implementation) if self.shared else 0


@dataclasses.dataclass(frozen=True)
class RouterLosses(End):
    """The sums of what routers add to the loss, one for each term.

    Args:
        terms_of_loss: their number.
    """

    terms_of_loss: int

    def streams(self, sizes: Sizes) -> list[int]:
        """The sums of each token."""
        return [sizes.stream_rows * self.terms_of_loss * sizes.master_itemsize]

    def collectives(self, step: Scenario) -> Iterator[Collective]:
        """Sums over tp, where it shards tokens that the logits' devices all have."""
        if step.config.layout.sequence_parallel:
            size = self.terms_of_loss * step.sizes.master_itemsize
            yield Collective(ALL_REDUCE, (Axis.TP,), step.micro_batches, step.micro_batches * size)
