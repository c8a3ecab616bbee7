"""The questions that a part of a layer answers, with the default answers.

Letters: T tokens of a sequence, D model, M micro-batches, L layers.
"""

import abc
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

from jaxptd.config import ModelConfig
from jaxptd.config.lora import INSIDE
from jaxptd.costs.collective import ALL_GATHER, PERMUTE, Collective
from jaxptd.costs.kept import MOST, Kept
from jaxptd.costs.program import Implementation, Work
from jaxptd.costs.terms import Term
from jaxptd.layout import Axis, Layout
from jaxptd.parts.adapters import low_columns
from jaxptd.parts.grid import product
from jaxptd.parts.parameters import HeadShape, LayoutSharding, Named, Sharding
from jaxptd.parts.scenario import Recomputed, Scenario
from jaxptd.parts.sizes import Sizes
from jaxptd.parts.working import PairBytes
from jaxptd.shapes import ParamShape

# Collectives of each kind per pair of matmuls: forward, and its conjugate backward.
FORWARD, BACKWARD = 1, 1
# Rounds per pair with collective matmul: a gather and a scatter forward, their conjugates backward,
# and another gather of x for the gradient of the weights.
ROUNDS = 2 * (FORWARD + BACKWARD) + 1


class Product(NamedTuple):
    """A matmul `[T, K] x [K, N]` on a device, or several in one kernel.

    name: for tables.
    T: rows of the first factor.
    K: columns of the first and rows of the second factor.
    N: columns of the second factor.
    matrices: number of matmuls of that size, each with a second factor of its own.
    apart: whether its part's backward repeats what it needs of it, so recomputing a layer does not.
    routed: whether its rows are those of experts.
    wide: whether fp8 leaves it as it is.
    """

    name: str
    T: int
    K: int
    N: int
    matrices: int = 1
    apart: bool = False
    routed: bool = False
    wide: bool = False


class Part(abc.ABC):
    """A pair of a layer's matmuls, with a norm before and a residual addition after it.

    The first matmul maps the residual stream to hidden units, the second maps these back. Sizes are
    those of the whole model, without padding.

    Attributes:
        layer: makes the part's layer; see `make_layer`.
        name: prefix of its parameters' names.
        title: the part's name in reports.
        first_title: its first matmul's name in reports.
        hidden: D.
        of_images: whether its tokens are patches of images, which devices share in strips.
        routes: whether its layer also takes the tokens' places, and returns terms of the loss.
    """

    layer: ClassVar[Callable[..., Any]]
    name: ClassVar[str]
    title: ClassVar[str]
    first_title: ClassVar[str]
    hidden: int
    of_images: ClassVar[bool] = False
    routes: ClassVar[bool] = False

    # ---- sizes ---------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """T that it requires; 0 if it takes any."""
        return 0

    @property
    @abc.abstractmethod
    def columns(self) -> int:
        """Columns of the first matmul."""

    @property
    @abc.abstractmethod
    def inner(self) -> int:
        """Rows of the second matmul."""

    @property
    def first_weights(self) -> int:
        """Elements of the first matmul's weights."""
        return self.hidden * self.columns

    @property
    def weights(self) -> int:
        """Elements of all matrices."""
        return self.first_weights + self.hidden * self.inner

    @property
    def expert_weights(self) -> int:
        """The part of these that belongs to experts, of which each device has some."""
        return 0

    def held(self, shards: int, expert_shards: int) -> float:
        """Elements of its matrices on a device, before ZeRO shards them.

        Args:
            shards: devices that share a matrix.
            expert_shards: devices that share the matrices of all experts.
        """
        return (self.weights - self.expert_weights) / shards + self.expert_weights / expert_shards

    def is_shared(self, expert_slices: int) -> bool:
        """True if tensor parallelism sums its outputs; expert_slices: devices that share experts.

        Experts that a device holds whole need no sum over tp.
        """
        return True

    def copies_sent(self, places: int | None) -> float:
        """Copies of a token that reach its experts, on average: one for each place with any.

        places: number of equal places that experts are divided among; None: one for each expert.
        """
        return 0.0

    def multiplications(self, tokens: int) -> int:
        """Multiplications with weights in a sequence of `tokens` tokens."""
        return tokens * self.weights

    def adapter_multiplications(self, tokens: int) -> int:
        """Multiplications with its adapters' weights in a sequence of `tokens` tokens."""
        shapes = self._adapters(Layout())
        return sum(self.tokens_of(n, tokens) * math.prod(x.shape) for n, x in shapes.items())

    def _adapters(self, layout: Layout) -> dict[str, ParamShape]:
        """The parameters of its adapters."""
        every = self.parameters(LayoutSharding(layout))
        return {name: shape for name, shape in every if INSIDE in name}

    @property
    def score_flops(self) -> int | Fraction:
        """FLOPs per token between the two matmuls, forward."""
        return 0

    @abc.abstractmethod
    def first(self, sizes: Sizes) -> int:
        """Columns of the first matmul, with padding."""

    @abc.abstractmethod
    def second(self, sizes: Sizes) -> int:
        """Rows of the second matmul, with padding."""

    def heads_on_device(self, sizes: Sizes) -> int:
        """Heads that a device computes, whole or a slice of each; 0 without heads."""
        return 0

    @property
    def head_shape(self) -> HeadShape | None:
        """Its heads, or None."""
        return None

    @property
    def key_columns(self) -> int:
        """Columns of the keys' (or the values') matmul; 0 without keys."""
        return 0

    @abc.abstractmethod
    def splits(self, layout: Layout) -> bool:
        """True if the sharded dim splits over the devices of a layer without padding."""

    def in_strips(self, devices: int) -> bool:
        """True if this many devices can share its images in strips."""
        return True

    # ---- parameters, and the layer -------------------------------------------------------------

    def make_layer(self, config: ModelConfig, **others: Any) -> Any:
        """Makes the layer that this description declares.

        Args:
            config: the model's, for settings that do not affect costs.
            others: tensor_parallel, rngs, and init_out, the initialiser of the second matmul's
                weight.
        """
        return type(self).layer(self, config, **others)

    @abc.abstractmethod
    def parameters(self, sharding: Sharding) -> Named:
        """Its parameters by their names within the part."""

    def common_parameters(self, sharding: Sharding, stack: str) -> Named:
        """Parameters that all layers of a stack share; stack: its name."""
        yield from ()

    # ---- bytes saved for backward --------------------------------------------------------------

    def taken(self, sizes: Sizes) -> int:
        """Bytes saved of the first matmul's input."""
        return sizes.taken

    @abc.abstractmethod
    def kept(self, sizes: Sizes) -> Iterator[Kept]:
        """The tensors between the two matmuls that backward needs."""

    def kept_of_source(self, sizes: Sizes) -> Iterator[Kept]:
        """The tensors of another sequence, which it reads, that backward needs."""
        yield from ()

    def adapters_kept(self, sizes: Sizes) -> Iterator[Kept]:
        """Products of adapters, x A, which backward needs for the gradient of B."""
        shapes = self._adapters(sizes.config.layout)
        names = [name for name in shapes if name.endswith("a")]
        low = sum(self.tokens_of(name, sizes.tokens) * low_columns(shapes[name]) for name in names)
        if low:
            yield Kept("low-rank products of adapters", low * sizes.itemsize, MOST)

    def tokens_of(self, name: str, tokens: int) -> int:
        """Tokens that the matrix of a parameter multiplies, where the part has `tokens`."""
        return tokens

    @abc.abstractmethod
    def pair_bytes(self, sizes: Sizes) -> PairBytes:
        """The tensors of its backward pass."""

    def turned_weights(self) -> int:
        """Elements of the matrices that attention in blocks on a grid copies for a loop."""
        return 0

    # ---- bytes sent ----------------------------------------------------------------------------

    def on_tp(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Collectives of activations, b*T/cp*D over tp, before and after the two matmuls.

        Collective matmul replaces them by rounds of tp-1 hops. The matmuls gather during these, so
        gathers are repeated only with the matmuls. Where backward is split, the gradient of the
        result passes in both halves.
        Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.

        Args:
            step: the step, with the sizes of the part's stack.
            again: what backward recomputes.
            times: number of layers times micro-batches.
        """
        tp, size = step.config.layout.tp, step.sizes.activations
        if step.config.layout.collective_matmul:
            splits = step.plan is not None and step.plan.schedule.splits
            hops = times * (ROUNDS + again.products + splits + again.last_product) * (tp - 1)
            yield Collective(PERMUTE, (Axis.TP,), hops, hops * size // tp)
            return
        for kind in step.kinds_on_tp:
            more = again.inputs if kind == ALL_GATHER else again.last_product
            count = times * (FORWARD + BACKWARD + more)
            yield Collective(kind, (Axis.TP,), count, count * size)

    def on_grid(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Collectives of both matmuls on a grid; arguments as in `on_tp`."""
        sizes, first, last = step.sizes, 1 + again.products, 1 + again.last_product
        yield from product(step, sizes.hidden, self.first(sizes), forwards=first, times=times)
        yield from product(step, self.second(sizes), sizes.hidden, forwards=last, times=times)

    def along_cp(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Collectives over the devices that share a sequence; arguments as in `on_tp`."""
        yield from ()

    # ---- seconds -------------------------------------------------------------------------------

    @abc.abstractmethod
    def products(self, work: Work) -> Iterator[Product]:
        """Its matmuls on a device."""

    def remade(self, work: Work) -> Iterator[Product]:
        """Its matmuls that backward always runs again, besides its gradients."""
        yield from ()

    def core_forward(self, work: Work) -> list[Term]:
        """The kernels between the two matmuls that are more than passes over memory."""
        return []

    def core_backward(self, work: Work) -> list[Term]:
        """The backward pass of `core_forward`."""
        return []

    def core_again(self, work: Work) -> list[Term]:
        """The kernels of `core_forward` that backward repeats where layers save `dots`."""
        return []

    def routing_forward(self, work: Work) -> list[Term]:
        """The kernels that choose experts, and bring tokens to them and back."""
        return []

    def routing_backward(self, work: Work) -> list[Term]:
        """The backward pass of `routing_forward`, with what it always repeats."""
        return []

    @abc.abstractmethod
    def moved_forward(self, implementation: Implementation) -> int:
        """Bytes per token that memory passes between the matmuls move, on all devices."""

    @abc.abstractmethod
    def moved_backward(self, implementation: Implementation) -> int:
        """Bytes per token that the backward passes of these move."""
