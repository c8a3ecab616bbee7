"""Products of float32 are exact on GPUs, whose default rounds their factors to TF32."""

import dataclasses

import pytest
from jax import lax

from jaxptd.analysis.flops import executions, is_product
from jaxptd.config import Config, Dtype, ModelConfig
from jaxptd.matmul import precision
from jaxptd.mesh import make_mesh
from jaxptd.step import Program

SMALL = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, seq_length=8, vocab_size=16)


@pytest.mark.parametrize(
    ("dtype", "on_gpus", "exact"),
    [("float32", True, True), ("bfloat16", True, False), ("float32", False, False)],
)
def test_which_products_are_exact(
    dtype: Dtype, on_gpus: bool, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "on_gpus", lambda mesh: on_gpus)
    config = Config(dataclasses.replace(SMALL, dtype=dtype))
    program = Program(config, make_mesh(config.layout))
    found = [each.params["precision"] for each, *_ in executions(program) if is_product(each)]
    assert len(found) > 10
    highest = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    assert set(found) == {highest if exact else None}
