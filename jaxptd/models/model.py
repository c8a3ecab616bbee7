"""The interface of a model, and the way of a batch through its layers on one stage.

A model names no axis and no collective. `x` is any tree of arrays, each as the residual stream has
it.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from jax import Array

from jaxptd.config import ModelConfig
from jaxptd.fields import check_argument
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.tensor_parallel import TensorParallel
from jaxptd.pipeline.pools import X
from jaxptd.zero.loop import number_of_layers, run_blocks

COMMON = "common"  # what the names of `Model.common`'s parameters begin with
# Of each stack: keys and values of the tokens so far; in training, the parameters that ZeRO holds.
GenerationState = dict[str, Any]


class Model(Protocol):
    """A flax module, as steps, pipelines and generation use it."""

    @property
    def config(self) -> ModelConfig:
        """Sizes and choices."""

    @property
    def offload(self) -> bool:
        """True if what `remat: dots` saves for backward is in host memory."""

    @property
    def stacks(self) -> Mapping[str, Any]:
        """The stacks of layers, in the order in which x goes through them; named as attributes.

        A stack has the parameters of L layers, `[L, ...]`. A layer of it is called with
        (x, places, number of the layer in the model, its state, `common`) and returns x and its
        state.
        """

    @property
    def common(self) -> Any:
        """A module with parameters that every layer may read; None without any."""

    def embed(self, batch: Mapping[str, Array], token_info: TokenInfo) -> X:
        """A batch, of which targets may be missing -> x before the first layer."""

    def enter(self, stack: str, x: X) -> X:
        """x after the stack before, or `embed` -> x as the first layer of a stack takes it."""

    def losses(self, x: X, batch: Mapping[str, Array], token_info: TokenInfo) -> dict[str, Array]:
        """x after all layers -> sums over this device's targets, as its family names them.

        Float32 at least.
        """

    def evaluated(
        self, x: X, batch: Mapping[str, Array], token_info: TokenInfo
    ) -> dict[str, Array]:
        """`losses`, with the sums of scores that only evaluations have."""

    def output(self, x: X) -> Array:
        """x after all layers -> logits[B, T, V], V sharded."""

    def empty_state(self, batch: int) -> GenerationState:
        """The state of all stacks before the first token, for this device's heads."""


def check_arguments(model: Any, config: ModelConfig, tensor_parallel: TensorParallel) -> None:
    """Raises UserError in the constructor of a model for an argument of another type."""
    name = f"jaxptd.{type(model).__name__}"
    check_argument(name, "config", config, ModelConfig)
    check_argument(name, "tensor_parallel", tensor_parallel, TensorParallel)


def run_layers(
    model: Model,
    batch: Mapping[str, Array],
    token_info: TokenInfo,
    state: GenerationState | None = None,
) -> tuple[X, GenerationState]:
    """A batch -> x after all layers, and the state: with these tokens, if one was given."""
    run = partial(run_blocks, config=model.config, offload=model.offload, common=model.common)
    x, new, first = model.embed(batch, token_info), {}, 0
    for name, stack in model.stacks.items():
        cache = state[name] if state else None
        x = model.enter(name, x)
        x, new[name] = run(stack, x, token_info, cache=cache, first=first)
        first += number_of_layers(stack)
    return x, new
