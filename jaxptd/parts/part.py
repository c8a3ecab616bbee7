"""The questions that a part of a layer answers, and what it says where it has nothing to say.

Letters: T tokens of a sequence, D model, M micro-batches, L layers.
"""

import abc
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

from jaxptd.config import ModelConfig
from jaxptd.costs.collective import ALL_GATHER, PERMUTE, Collective
from jaxptd.costs.kept import Kept
from jaxptd.costs.program import Implementation, Work
from jaxptd.costs.terms import Term
from jaxptd.layout import Axis, Layout
from jaxptd.parts.grid import product
from jaxptd.parts.parameters import HeadShape, Named, Sharding
from jaxptd.parts.scenario import Recomputed, Scenario
from jaxptd.parts.sizes import Sizes
from jaxptd.parts.working import PairBytes

# Collectives of each kind of a pair of products: forward, and its conjugate backward.
FORWARD, BACKWARD = 1, 1
# Rounds of a pair with collective matmul: a gather and a scatter forward, their conjugates
# backward, and the gather of x once more, for the gradient of the weights.
ROUNDS = 2 * (FORWARD + BACKWARD) + 1


class Product(NamedTuple):
    """A product `[T, K] x [K, N]` on a device."""

    name: str
    T: int
    K: int
    N: int


class Part(abc.ABC):
    """A pair of products of a layer, with a norm before it and a residual sum behind it.

    The first product makes hidden units of the residual stream, the second one the residual stream
    of them. Sizes are those of the whole model, without padding.

    Attributes:
        layer: makes its layer; see `make_layer`.
        name: with which the names of its parameters begin.
        title: in words.
        first_title: its first product in words.
        hidden: D.
        of_images: whether its tokens are patches of images, which devices share in strips.
    """

    layer: ClassVar[Callable[..., Any]]
    name: ClassVar[str]
    title: ClassVar[str]
    first_title: ClassVar[str]
    hidden: int
    of_images: ClassVar[bool] = False

    # ---- sizes ---------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """T that it is made for; 0 if it takes any."""
        return 0

    @property
    @abc.abstractmethod
    def columns(self) -> int:
        """Columns of the first product."""

    @property
    @abc.abstractmethod
    def inner(self) -> int:
        """Rows of the second product."""

    @property
    def first_weights(self) -> int:
        """Elements of the first product's matrices."""
        return self.hidden * self.columns

    @property
    def weights(self) -> int:
        """Elements of all matrices."""
        return self.first_weights + self.hidden * self.inner

    def multiplications(self, tokens: int) -> int:
        """Multiplications with weights in a sequence of so many tokens."""
        return tokens * self.weights

    @property
    def score_flops(self) -> int:
        """FLOPs of a token between its products, forward."""
        return 0

    @abc.abstractmethod
    def first(self, sizes: Sizes) -> int:
        """Columns of the first product, with padding."""

    @abc.abstractmethod
    def second(self, sizes: Sizes) -> int:
        """Rows of the second product, with padding."""

    def heads_on_device(self, sizes: Sizes) -> int:
        """Heads that a device computes, whole or a slice of each; 0 without any."""
        return 0

    @property
    def head_shape(self) -> HeadShape | None:
        """Its heads; None without any."""
        return None

    @property
    def key_columns(self) -> int:
        """Columns of the product that makes keys, or values; 0 without any."""
        return 0

    @abc.abstractmethod
    def splits(self, layout: Layout) -> bool:
        """True if what the devices of a layer share splits over them without padding."""

    def in_strips(self, devices: int) -> bool:
        """True if so many devices can share images in strips where it is."""
        return True

    # ---- parameters, and the layer -------------------------------------------------------------

    def make_layer(self, config: ModelConfig, **others: Any) -> Any:
        """The layer that is declared from this description.

        Args:
            config: of the model, for what costs do not depend on.
            others: tensor_parallel, rngs, and init_out of its second product's weight.
        """
        return type(self).layer(self, config, **others)

    @abc.abstractmethod
    def parameters(self, sharding: Sharding) -> Named:
        """Its parameters, by their names inside the part."""

    def common_parameters(self, sharding: Sharding, stack: str) -> Named:
        """Parameters that all layers of a stack share; stack: its name."""
        yield from ()

    # ---- bytes kept ----------------------------------------------------------------------------

    @abc.abstractmethod
    def kept(self, sizes: Sizes) -> Iterator[Kept]:
        """The tensors between its two products that backward needs."""

    def kept_of_source(self, sizes: Sizes) -> Iterator[Kept]:
        """The tensors of another sequence, which it reads, that backward needs."""
        yield from ()

    @abc.abstractmethod
    def pair_bytes(self, sizes: Sizes) -> PairBytes:
        """The tensors of its backward pass."""

    def turned_weights(self) -> int:
        """Elements of the matrices that a grid's attention in blocks copies for a loop."""
        return 0

    # ---- bytes sent ----------------------------------------------------------------------------

    def on_tp(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Activations of b*T/cp*D over tp, before and behind its products.

        With collective matmul in rounds of tp-1 hops: products gather in these, so the gathers run
        again only with the products. Where backward is split, the gradient of the result passes in
        both halves.
        Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.

        Args:
            step: with the sizes of its stack.
            again: what backward computes again.
            times: layers in all micro-batches.
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
        """Collectives of both products on a grid; arguments of `on_tp`."""
        sizes, first, last = step.sizes, 1 + again.products, 1 + again.last_product
        yield from product(step, sizes.hidden, self.first(sizes), forwards=first, times=times)
        yield from product(step, self.second(sizes), sizes.hidden, forwards=last, times=times)

    def along_cp(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Collectives over the devices that share a sequence; arguments of `on_tp`."""
        yield from ()

    # ---- seconds -------------------------------------------------------------------------------

    @abc.abstractmethod
    def products(self, work: Work) -> Iterator[Product]:
        """Its products, on a device."""

    def core_forward(self, work: Work) -> list[Term]:
        """The kernels between its products, if they are more than passes over memory."""
        return []

    def core_backward(self, work: Work) -> list[Term]:
        """The backward pass of `core_forward`."""
        return []

    @abc.abstractmethod
    def moved_forward(self, implementation: Implementation) -> int:
        """Bytes of a token that passes over memory between its products move, on all devices."""

    @abc.abstractmethod
    def moved_backward(self, implementation: Implementation) -> int:
        """Bytes of a token that the backward passes of these move."""
