"""The MLP of a layer: its description and costs. The layer is `layers/mlp.py`.

Letters: T tokens, D model, F hidden units.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import ClassVar, Self

from jaxptd.config import ModelConfig
from jaxptd.config.lora import LoRA
from jaxptd.context_parallel import Imported
from jaxptd.costs.kept import MOST, SOME, Kept
from jaxptd.costs.program import Implementation, Work
from jaxptd.errors import UserError, did_you_mean, quoted
from jaxptd.fields import checked
from jaxptd.layout import Layout
from jaxptd.parts.adapters import Adapter
from jaxptd.parts.parameters import Column, Named, Row, Sharding, inside
from jaxptd.parts.part import Part, Product
from jaxptd.parts.sizes import Sizes
from jaxptd.parts.working import PairBytes


@dataclasses.dataclass(frozen=True)
class MLPShape(Part):
    """A pair of matmuls with an activation between them.

    Args:
        hidden: D.
        size: F.
        gated: whether the first matmul computes a gate for each hidden unit, `[D, 2, F]`.
        bias: whether both matmuls have a bias.
        lora: adapters, of the matmuls that it names.
        path: the MLP's name in a layer.
    """

    hidden: int
    size: int
    gated: bool
    bias: bool = False
    lora: LoRA | None = None
    path: str = "mlp"

    layer = Imported("jaxptd.layers.mlp", "MLP")
    name: ClassVar[str] = "mlp"
    title: ClassVar[str] = "the MLP"
    first_title: ClassVar[str] = "up product"

    @classmethod
    def of(cls, model: ModelConfig) -> Self:
        """The MLP of a model."""
        options = model.block
        bias = options.linear_bias == "all"
        size = model.mlp_size
        return cls(model.hidden_size, size, options.gated, bias=bias, lora=model.lora)

    # ---- sizes ---------------------------------------------------------------------------------

    @property
    def units(self) -> tuple[int, ...]:
        """The shape of the first matmul's output: `(F,)`, or `(2, F)` with a gate."""
        return (2, self.size) if self.gated else (self.size,)

    @property
    def _each(self) -> int:
        """Columns of the first matmul per hidden unit."""
        return math.prod(self.units[:-1])

    @property
    def columns(self) -> int:
        return math.prod(self.units)

    @property
    def inner(self) -> int:
        return self.size

    def first(self, sizes: Sizes) -> int:
        return self._each * self.second(sizes)

    def second(self, sizes: Sizes) -> int:
        return sizes.padded(self.size)

    def splits(self, layout: Layout) -> bool:
        return self.size % layout.tp == 0

    # ---- parameters ----------------------------------------------------------------------------

    @property
    def up(self) -> Column:
        """The first matmul."""
        gates, adapter = len(self.units) - 1, Adapter.of(self.lora, f"{self.path}.up")
        return Column(
            self.hidden, self.units, dim=gates, bias=self.bias, parts=gates, adapter=adapter
        )

    @property
    def down(self) -> Row:
        """The second matmul."""
        adapter = Adapter.of(self.lora, f"{self.path}.down")
        return Row((self.size,), self.hidden, bias=self.bias, adapter=adapter)

    def parameters(self, sharding: Sharding) -> Named:
        yield from inside("up", self.up.parameters(sharding))
        yield from inside("down", self.down.parameters(sharding))

    # ---- bytes ---------------------------------------------------------------------------------

    def kept(self, sizes: Sizes) -> Iterator[Kept]:
        units = sizes.tokens * sizes.itemsize * self.second(sizes) // sizes.matrix_shards
        yield Kept("input of the activation", units * self._each, MOST)
        yield Kept("input of the down product", units, SOME)

    def pair_bytes(self, sizes: Sizes) -> PairBytes:
        return PairBytes.of(self, sizes)

    # ---- seconds -------------------------------------------------------------------------------

    def products(self, work: Work) -> Iterator[Product]:
        devices = work.parallelism.inner
        yield Product("mlp in", work.tokens, self.hidden, self.columns // devices)
        yield Product("mlp out", work.tokens, self.size // devices, self.hidden)

    def moved_forward(self, implementation: Implementation) -> int:
        return 2 * (self.columns + self.size)

    def moved_backward(self, implementation: Implementation) -> int:
        sums = implementation.bias and implementation.sums_apart
        return 2 * sums * self.columns + 2 * (2 * self.columns + self.size)


# ---- kinds of MLPs -------------------------------------------------------------------------------

_KINDS: dict[str, Callable[[ModelConfig], Part]] = {"dense": MLPShape.of}


@checked("jaxptd.register_mlp")
def register_mlp(name: str, make: Callable[[ModelConfig], Part]) -> None:
    """Adds an MLP of your own; `model.mlp` accepts its name from then on.

    Call it before you use a config, in every process. A file that calls it and then
    `jaxptd.__main__.run()` has all commands; see `examples/own_part.py`.

    Args:
        name: letters, digits, `-` and `_`.
        make: model's config -> the description of its MLP, a `jaxptd.parts.part.Part`.

    Raises:
        UserError: the name is taken or invalid.
    """
    if not re.fullmatch(r"[\w-]+", name):
        raise UserError(
            f"register_mlp: {quoted(name)} is not a valid name; use letters, digits, - and _"
        )
    if name in _KINDS:
        raise UserError(f"register_mlp: the MLP {quoted(name)} exists; use another name")
    _KINDS[name] = make


def mlp_of(model: ModelConfig) -> Part:
    """The description of a model's MLP, by `model.mlp`.

    Raises:
        UserError: there is no MLP of that name.
    """
    if model.mlp not in _KINDS:
        use = f"use {', '.join(_KINDS)}, or run the file that registers it"
        remedy = did_you_mean(model.mlp, _KINDS, otherwise=use)
        raise UserError(f"model.mlp={quoted(model.mlp)}: there is no such MLP; {remedy}")
    return _KINDS[model.mlp](model)
