"""Families are rows of tables; a model's architecture lists its matrices."""

import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import tiny

import jaxptd
from jaxptd import Config, Layout, ModelConfig, Program, make_mesh
from jaxptd.config import FamilyName
from jaxptd.config import block as presets
from jaxptd.errors import UserError
from jaxptd.models.families import FAMILIES, architecture_of

PACKAGE = Path(jaxptd.__file__).parent
# A literal comparison with a family's name, or membership in a literal list of names.
BRANCH = re.compile(r"""family\s*(==|!=|in|not in)\s*["'({\[]|["']\s*(==|!=)\s*[\w.]*family""")
SIZES = {"num_layers": 4, "hidden_size": 24, "num_heads": 4, "seq_length": 8, "vocab_size": 13}


def test_every_family_has_a_row_in_every_table() -> None:
    assert set(FAMILIES) == set(presets.FAMILIES) == set(get_args(FamilyName))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('if model.family == "gpt":', True),
        ('family in ("gpt", "llama")', True),
        ('"t5" != config.model.family', True),
        ("FAMILIES[model.family]", False),
        ("if family not in TENSORS:", False),
    ],
)
def test_the_search_knows_a_branch(code: str, found: bool) -> None:
    assert bool(BRANCH.search(code)) == found


def test_no_code_asks_for_a_family_by_name() -> None:
    found = [path for path in PACKAGE.rglob("*.py") if BRANCH.search(path.read_text())]
    assert found == []


def test_a_decoder_that_sees_its_targets_is_refused() -> None:
    words = "model.causal=false: a decoder predicts the next token, which its tokens would see"
    with pytest.raises(UserError, match=words):
        Program(Config(ModelConfig(**SIZES, causal=False)), make_mesh(Layout()))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_architecture_has_the_stacks_of_the_model(family: FamilyName) -> None:
    sizes = tiny.BASES.get(family) or ModelConfig(family=family, **SIZES)  # type: ignore[arg-type]
    program = Program(Config(sizes), make_mesh(Layout()))
    stacks = {info.stack: info.shape[0] for info in program.infos.values() if info.stack}
    assert stacks == {each.name: each.layers for each in architecture_of(sizes).stacks}


def test_what_has_no_times_is_said() -> None:
    config = Config(ModelConfig(family="swin"))
    with pytest.raises(UserError, match="model.family=swin: its step time cannot be predicted"):
        jaxptd.plan(config, gpus=2, gpu="h200")


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tie_embeddings": False, "ffn_hidden_size": 20},
        {"family": "llama", "num_kv_heads": 2, "head_size": 10, "tie_embeddings": False},
        {"family": "qwen3", "num_kv_heads": 1, "window": 3},
        {"num_layers": 3, "window": 3, "window_layers": (True, False)},
        {"family": "gemma2", "window": 3, "window_layers": (True, False), "head_size": 6},
    ],
    ids=str,
)
def test_flops_are_those_of_every_matrix_that_is_multiplied(model: dict[str, Any]) -> None:
    """6 per weight, and 12 T per element of a query (arXiv 2204.02311, appendix B)."""
    sizes = ModelConfig(**{**SIZES, **model})
    program = Program(Config(sizes), make_mesh(Layout()))
    looked_up = {"positions.table"} | (set() if sizes.tie_embeddings else {"tokens.table"})
    matrices = [i for name, i in program.infos.items() if i.decay and name not in looked_up]
    weights = sum(math.prod(info.shape) for info in matrices)
    reaches = [sizes.window if each and sizes.window else 8 for each in sizes.windowed]
    scores = 12 * 4 * sizes.block.head_size * sum(reaches)
    assert architecture_of(sizes).flops == 8 * (6 * weights + scores)
