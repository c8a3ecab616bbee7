"""Parameters derived from a model's architecture are those that the model declares."""

import dataclasses
from typing import Any

import pytest
import tiny
from turns import by_turns, slow

from jaxptd.layout import Layout
from jaxptd.models.stages import parameter_infos
from jaxptd.shapes import ParamShape

ODD = {"num_heads": 3, "hidden_size": 15, "ffn_hidden_size": 23}
GROUPS = {"family": "qwen3", "num_kv_heads": 2, "head_size": 6, "tie_embeddings": False}
BIASES = {"family": "qwen2", "num_kv_heads": 1, "vocab_multiple": 32, "max_positions": None}
POST = {"norm_order": "post", "linear_bias": "qkv", "max_positions": 12}
GEMMA = {"family": "gemma3_text", "num_kv_heads": 2, "head_size": 6}
MODELS = [{}, GROUPS, {"family": "bert"}, tiny.T5, {"family": "llama"}, BIASES, POST, GEMMA]
GPT_OSS = tiny.MOE | {"family": "gpt_oss", "moe.shared_ffn_hidden_size": 8}
LAYOUTS = [
    Layout(),
    Layout(tp=4),
    Layout(row=2, col=2),
    Layout(row=2, col=2, attention2d="blocks"),
    Layout(row=4, col=2, matmul2d="summa"),
    Layout(row=1, col=2, matmul2d_slices=2),
    Layout(dp=2, tp=2, sequence_parallel=True),
]
ONE = {"num_kv_heads": 1}
FOUR = {"num_layers": 4, "micro_batches": 4}
BLOCKS = Layout(row=2, col=2, attention2d="blocks", matmul2d_slices=2)
PIPELINES = [
    (Layout(pp=2, tp=2), FOUR | {"num_layers": 5}),
    (Layout(pp=2, stage_layers=(1, 4)), FOUR | {"num_layers": 5} | GROUPS),
    (Layout(pp=2, tp=2, schedule="zb-v"), tiny.T5 | FOUR),
    (Layout(pp=2, tp=2, stage_layers=(4, 2)), FOUR | {"num_layers": 6, "head_sizes": (2, 6)}),
    (Layout(pp=2, row=2, col=2, schedule="interleaved"), FOUR | {"family": "bert"}),
    slow(Layout(pp=4, tp=2), FOUR | POST),
    slow(Layout(pp=2, tp=2), FOUR | GEMMA),
    (Layout(ep=2, tp=2), GPT_OSS | {"hidden_size": 15, "num_heads": 3, "head_size": 4} | ONE),
    slow(Layout(ep=2, tp=2, experts="whole"), GPT_OSS),
]
CASES = [
    *by_turns(LAYOUTS, MODELS),
    (BLOCKS, ODD),
    (BLOCKS, GROUPS),
    slow(BLOCKS, tiny.T5 | ODD | {"head_size": 5}),
    *PIPELINES,
]


def described(info: Any) -> tuple:
    """The fields of an info except its name."""
    values = {field.name: getattr(info, field.name) for field in dataclasses.fields(ParamShape)}
    return tuple(map(str, (*values.values(), info.axes_of_dims)))


@pytest.mark.parametrize(("layout", "choice"), CASES, ids=str)
def test_an_architecture_has_the_parameters_of_the_model(layout: Layout, choice: dict) -> None:
    program = tiny.program(layout, **choice)
    found = parameter_infos(program.config).values()
    assert sorted(map(described, found)) == sorted(map(described, program.infos.values()))
