"""How a batch passes through the stacks of a model."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from flax import nnx
from jax import Array

from jaxptd import Layout, ModelConfig
from jaxptd.analysis.jaxprs import equations, traced
from jaxptd.models.model import run_layers


class Digit(nnx.Module):
    """Layers that append their number to the digits, and add the common value, if any, to a sum."""

    def __init__(self, count: int) -> None:
        self.w, self.remats = nnx.Param(jnp.zeros(count)), (("none", count),)

    def __call__(
        self, x: tuple[Array, Array], token_info: Any, number: Array, cache: Any, common: Any = 0
    ) -> tuple[tuple[Array, Array], Any]:
        digits, word = x
        return (10 * digits + number, word + common), cache


@pytest.mark.parametrize("scan_layers", [True, False])
def test_layers_are_numbered_through_all_stacks_and_read_the_common_parameters(scan_layers) -> None:
    model: Any = SimpleNamespace(
        config=ModelConfig(scan_layers=scan_layers),
        offload=False,
        common=jnp.int32(7),
        stacks={"encoder": Digit(2), "decoder": Digit(3)},
        embed=lambda batch, token_info: (batch["tokens"], jnp.int32(0)),
        enter=None,
    )
    x, state = run_layers(model, {"tokens": jnp.int32(5)}, None)  # type: ignore[arg-type]
    assert [int(each) for each in x] == [501234, 5 * 7]
    assert state == {"encoder": None, "decoder": None}


@pytest.mark.parametrize(
    ("choice", "looped"),
    [
        ({"num_layers": 3}, True),
        ({"num_layers": 3, "scan_layers": False}, False),
        ({"num_layers": 3, "remat_layers": 1}, False),
        ({"num_layers": 1}, False),
    ],
    ids=str,
)
def test_what_is_recomputed_is_kept_apart_where_xla_runs_no_loop(
    choice: dict[str, Any], looped: bool
) -> None:
    """XLA removes a loop of one iteration, and would reuse the first computation's results."""
    program = tiny.program(Layout(), remat="dots", **choice)
    remats = [e.params for e in equations(traced(program).jaxpr) if "prevent_cse" in e.params]
    # Recomputed slices of weights may be merged with the first ones.
    layers = [
        each for each in remats if each["policy"] is not jax.checkpoint_policies.nothing_saveable
    ]
    assert (False in [each["prevent_cse"] for each in layers]) == looped
