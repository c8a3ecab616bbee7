"""float32 matmuls are exact on GPUs, whose default rounds the operands to TF32."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from jax import lax
from turns import slow

from jaxptd.analysis.jaxprs import equations, executions, is_product
from jaxptd.api.harness import _score_function
from jaxptd.api.whole_batches import _logits_function
from jaxptd.config import Config, Dtype, ModelConfig
from jaxptd.matmul import precision
from jaxptd.mesh import make_mesh
from jaxptd.run.generator import NONE, Generator, Sampling
from jaxptd.step import Program

HIGHEST = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
SMALL = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, seq_length=8, vocab_size=16)


@pytest.mark.parametrize(
    ("dtype", "on_gpus", "exact"),
    [("float32", True, True), ("bfloat16", True, False), slow("float32", False, False)],
)
def test_which_products_are_exact(
    dtype: Dtype, on_gpus: bool, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "on_gpus", lambda mesh: on_gpus)
    config = Config(dataclasses.replace(SMALL, dtype=dtype))
    program = Program(config, make_mesh(config.layout))
    found = [each.params["precision"] for each, *_ in executions(program) if is_product(each)]
    assert len(found) > 10
    assert set(found) == {HIGHEST if exact else None}


@pytest.mark.parametrize("function", [_logits_function, _score_function])
def test_so_are_those_of_a_trained_model(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "on_gpus", lambda mesh: True)
    program = Program(Config(SMALL), make_mesh(Config().layout))
    tokens = np.zeros((1, 8), np.int32)
    arguments = (tokens,) if function is _logits_function else (tokens, tokens)
    jaxpr = function(program).trace(program.abstract_state["params"], *arguments).jaxpr
    found = [each.params["precision"] for each in equations(jaxpr) if is_product(each)]
    assert set(found) == {HIGHEST}


def test_so_are_those_of_generated_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "on_gpus", lambda mesh: True)
    program = Program(Config(SMALL), make_mesh(Config().layout))
    generator = Generator(program, 16, Sampling(temperature=0))
    batch, keys = generator._batch([[1, 2]]), generator._keys([2], 1)
    given, params = np.full((3, 1), NONE, np.int32), program.abstract_state["params"]
    jaxpr = generator._write.trace(params, batch, keys, given, np.int32(3)).jaxpr
    found = [each.params["precision"] for each in equations(jaxpr) if is_product(each)]
    assert set(found) == {HIGHEST}
