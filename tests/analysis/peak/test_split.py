"""Compares what B hands to W by the formula with what it hands over in the program."""

import math
from typing import Any

import jax.numpy as jnp
import pytest
import tiny
from turns import slow

from jaxptd.analysis.memory_report import counted
from jaxptd.analysis.peak.working import handed_on
from jaxptd.layout import Layout
from jaxptd.models.families import architecture_of, sizes_of
from jaxptd.pipeline.split_backward import PassedStorage

LLAMA = {"family": "llama", "num_kv_heads": 4, "num_heads": 8, "hidden_size": 32}
RINGS = {"tp": 4, "sequence_parallel": True, "collective_matmul": True}
CASES: list[Any] = [
    ({"schedule": "zb-v"}, {"num_layers": 4}),
    slow({"schedule": "zb-h1", "cp": 2}, {"remat": "dots"}),
    slow({"tp": 2}, {"remat": "dots"}),
    ({"tp": 2, "sequence_parallel": True}, LLAMA),
    slow(RINGS, {"dropout": 0.1}),
    (RINGS, {"remat": "dots"}),
    slow({"row": 2, "col": 2}, {}),
    ({"row": 2, "col": 2}, {"remat": "dots"}),
    slow({"row": 2, "col": 2}, LLAMA),
    slow({"row": 2, "col": 2, "attention2d": "blocks"}, {"remat": "dots"}),
    slow({"row": 2, "col": 2, "matmul2d": "cannon"}, {"remat": "attention"}),
]


@pytest.mark.parametrize(("layout", "model"), CASES, ids=str)
def test_the_formula_is_what_the_program_hands_on(
    layout: dict[str, Any], model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def plan(*arguments: Any) -> PassedStorage:
        storage = make(*arguments)
        found.append(storage)
        return storage

    make = PassedStorage.plan
    monkeypatch.setattr(PassedStorage, "plan", plan)
    spread = Layout(**{"pp": 2, "schedule": "zb-h1", **layout})
    program = tiny.program(spread, **{"dtype": "bfloat16", "micro_batches": 4, **model})
    counted(program)
    (stack,) = architecture_of(program.config.model).stacks
    sizes = sizes_of(program.config)
    sublayers = [part.pair_bytes(sizes) for part in stack.parts]
    wide = [x for x in found[0].between if x.dtype == jnp.bfloat16]  # the others have no token dim
    assert handed_on(program.config, sublayers, program.config.model.remat) == sum(
        math.prod(x.shape) * x.dtype.itemsize for x in wide
    )
