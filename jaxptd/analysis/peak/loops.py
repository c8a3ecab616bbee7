"""The loops over layers of a step: what each keeps for backward, and copies of its parameters.

Bytes are of one device.
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property

from jaxptd.analysis import memory_model
from jaxptd.analysis.memory_model import Stack
from jaxptd.analysis.peak import working
from jaxptd.analysis.peak.split import handed_on
from jaxptd.analysis.peak.working import PairBytes
from jaxptd.analysis.sizes import Sizes
from jaxptd.config import Config
from jaxptd.models.inventory import MLP, Pair
from jaxptd.pipeline.placement import Stages, of_stack


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
    stack: Stack
    parameters: int
    shares: bool = False
    between: int = 0

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of a layer."""
        return Sizes(self.config).of_stack(self.stack.parts)

    @cached_property
    def pairs(self) -> tuple[PairBytes, ...]:
        """The bytes of a layer's pairs of products."""
        return tuple(working.pair_bytes(self.sizes, pair) for pair in self.stack.parts.pairs)

    @property
    def is_fp8(self) -> bool:
        """True if products of whole matrices are in 8 bits; a grid has those of panels."""
        return self.config.model.products == "fp8" and not self.config.layout.has_grid

    # ---- activations ---------------------------------------------------------------------------

    @cached_property
    def kept(self) -> int:
        """Bytes that backward needs: stacked over the layers, or a pipeline's pools."""
        remat = self.stack.remat
        one = memory_model.layer(self.config, self.stack.parts, remat) - self._not_kept()
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
        remat, attentions = self.stack.remat, [x for x in self.pairs if not x.is_mlp]
        outputs = sum(each.second for each in attentions)
        grid = self.config.layout.has_grid and self.config.layout.pp == 1
        if remat == "dots" and grid and not self.sizes.has_blocks:
            return outputs
        if remat == "none" and self.is_fp8 and not self.config.layout.collective_matmul:
            first = [0 if x.again else x.taken for x in self.pairs]
            taken = sum(first) + sum(x.second for x in self.pairs if x.is_mlp)
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
        own = working.layer(self.pairs, self.stack.remat, at_once=self._at_once)
        moved = (config.layout.fetches_layers + config.prefetches) * self._whole
        on_way = self._largest if config.prefetches and config.zero >= 2 else 0
        on_way = self.weights if config.scatters_last or config.layout.has_grid else on_way
        moved += on_way * sizes.master_itemsize // sizes.matrix_shards
        return own + moved

    @property
    def _at_once(self) -> bool:
        """True if products for gradients of weights do not wait for the end of a layer's backward.

        With norms of sums, and all computed again, they were not seen to wait for whole scores.
        """
        config, scores = self.config, any(each.scores for each in self.pairs)
        early = config.model.block.norm_order == "post" and self.stack.remat == "full" and scores
        return config.layout.pp > 1 or early

    @property
    def gathered(self) -> int:
        """Parameters of the last layer, gathered from forward on where backward begins with it."""
        config = self.config
        return self._whole if config.layout.fetches_layers and config.prefetches else 0

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
        return sum(pair.weights for pair in self.stack.parts.pairs)

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
        return max(_first_weights(pair) for pair in self.stack.parts.pairs)

    @cached_property
    def copies(self) -> int:
        """Copies of parameters that XLA makes for the loop."""
        split = self.shares or not self.config.model.scan_layers
        found = self.parameters if split else 0
        if self.sizes.has_blocks:  # the matrix behind attention, transposed
            heads = sum(a.hidden * a.heads * a.head_size for a in self.stack.parts.attentions)
            found += self.share(heads)
        return found


def _first_weights(pair: Pair) -> int:
    """Elements of the matrix of a pair's first product."""
    if isinstance(pair, MLP):
        return pair.hidden * pair.size * (2 if pair.gated else 1)
    return pair.weights - pair.hidden * pair.heads * pair.head_size


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
    weights = [each.layers * sum(x.weights for x in each.parts.pairs) for each in stacks]
    layers, names = state["gradients"] - ends, [each.parts.name for each in stacks]
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
