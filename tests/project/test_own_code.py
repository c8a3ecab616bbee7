"""`examples/own_part.py` and `examples/own_model.py`: every command works with them."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.sharding import PartitionSpec as P
from one_device import hold
from turns import slow

import jaxptd
from jaxptd.analysis import memory_model
from jaxptd.analysis.count import count, formula
from jaxptd.analysis.memory_report import counted
from jaxptd.analysis.traffic import expected
from jaxptd.config.block import FAMILIES as PRESETS
from jaxptd.costs.collective import add_up
from jaxptd.errors import UserError
from jaxptd.fields import values
from jaxptd.hf.sizes import config_json
from jaxptd.layers.for_layout import make_tensor_parallel
from jaxptd.layout import Layout
from jaxptd.mesh import make_mesh
from jaxptd.models.families import FAMILIES
from jaxptd.models.stages import parameter_infos
from jaxptd.params import normal
from jaxptd.parts import mlp
from jaxptd.parts.mlp import MLPShape, mlp_of, register_mlp

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PART = {"mlp": "squared-relu", "ffn_hidden_size": 23}  # no number of devices divides it
MODEL = {"family": "parallel-gpt"}
FULL = MODEL | {"remat": "full", "num_kv_heads": 2}
LAYOUTS = [
    Layout(tp=2, sequence_parallel=True),
    Layout(dp=2, tp=2, zero=3),
    Layout(dp=2, cp=2, tp=2, zero=2),
    Layout(row=2, col=2),
    Layout(tp=4, sequence_parallel=True, collective_matmul=True),
    Layout(pp=2, dp=2),
]
CASES = [
    (LAYOUTS[0], PART),
    (LAYOUTS[1], MODEL),
    *(slow(layout, PART) for layout in LAYOUTS[1:]),
    *(slow(layout, MODEL) for layout in (LAYOUTS[0], *LAYOUTS[2:])),
    *(slow(layout, FULL) for layout in LAYOUTS),
    *(slow(layout, MODEL | {"remat": "dots"}) for layout in LAYOUTS[:4]),
]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Registers both, and restores the tables for other tests of this process."""
    tables = (FAMILIES, PRESETS, values._ADDED, mlp._KINDS)
    before = [dict(table) for table in tables]
    runpy.run_path(str(EXAMPLES / "own_part.py"))
    runpy.run_path(str(EXAMPLES / "own_model.py"))
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def test_the_part_is_short() -> None:
    assert len((EXAMPLES / "own_part.py").read_text().splitlines()) <= 80


SPLIT = [slow(Layout(pp=2, dp=2, schedule="zb-h1"), choice) for choice in (PART, MODEL)]


@pytest.mark.parametrize(("layout", "choice"), [*CASES, *SPLIT], ids=str)
def test_it_is_equal_to_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


@pytest.mark.parametrize(("layout", "choice"), CASES, ids=str)
def test_formulas_say_what_its_program_moves_and_keeps(layout: Layout, choice: dict) -> None:
    program = tiny.program(layout, **choice)
    assert count(program) == formula(program)
    plan = program.resolved.plan
    assert counted(program) == memory_model.activations(program.config, plan)
    # A plan applies the same formulas to shapes without building a model.
    infos = parameter_infos(program.config)
    assert add_up(expected(program.config, infos, plan)) == formula(program)


def test_the_scale_is_a_parameter_of_each_layer() -> None:
    program = jaxptd.Program(tiny.config(Layout(), **PART), make_mesh(Layout()))
    assert program.infos["blocks.mlp.scale"].shape == (2, 23)
    assert np.all(np.asarray(program.init_state()["params"]["blocks.mlp.scale"]) == 1)


def test_the_layer_is_its_formula() -> None:
    config = tiny.config(Layout(), **PART).model
    rng = np.random.default_rng(0)

    def run(x_BTD: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        own = {"tensor_parallel": make_tensor_parallel(Layout()), "rngs": nnx.Rngs(0)}
        layer = mlp_of(config).make_layer(config, init_out=normal(0.02), **own)
        layer.scale = nnx.Param(jnp.arange(23, dtype=jnp.float32))
        arrays = {"up": layer.up.w[...], "down": layer.down.w[...], "scale": layer.scale[...]}
        return layer(x_BTD), arrays

    x = rng.standard_normal((2, 3, 16)).astype(np.float32)
    mesh = make_mesh(Layout())
    y, w = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P()))(x)
    up, down, scale = (np.asarray(w[name]) for name in ("up", "down", "scale"))
    want = (np.maximum(x @ up, 0) ** 2 * scale) @ down
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-6)


def test_parallel_layers_have_one_norm() -> None:
    infos = parameter_infos(tiny.config(Layout(), **MODEL))
    assert [name for name in infos if "norm" in name] == ["blocks.norm.w", "blocks.norm.b"] + [
        name for name in infos if name.startswith("head.norm")
    ]


# ---- as commands ---------------------------------------------------------------------------------

OPTIONS = {
    "own_part.py": ("--model.mlp", "squared-relu"),
    "own_model.py": ("--model.family", "parallel-gpt"),
}


def run(example: str, command: str, *words: str, cwd: Path) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, str(EXAMPLES / example), command, *words, *OPTIONS[example]]
    found = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize("example", ["own_part.py", slow("own_model.py")])
def test_its_layouts_are_planned(example: str, tmp_path: Path) -> None:
    words = ("--config", "gpt2-124m", "--gpus", "8", "--gpu", "h100", "--json")
    assert len(json.loads(run(example, "plan", *words, cwd=tmp_path))["best"]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("example", OPTIONS)
def test_it_trains(example: str, tmp_path: Path) -> None:
    words = ("--config", "test-tiny", "--layout.tp", "2", "--train.steps", "20")
    run(example, "train", *words, "--train.run_dir", "run", cwd=tmp_path)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(row)["loss"] for row in rows if '"loss"' in row]
    assert losses[-1] < losses[0]


# ---- refused -------------------------------------------------------------------------------------


def test_hugging_face_has_no_such_mlp() -> None:
    model = jaxptd.ModelConfig(mlp="squared-relu", vocab_size=13)
    with pytest.raises(UserError, match="model.mlp=squared-relu: Hugging Face's gpt2 has dense"):
        config_json(model, dtype="float32", tokenizer=None)


def test_images_have_no_such_mlp() -> None:
    config = tiny.config(Layout(), family="swin", mlp="squared-relu")
    with pytest.raises(UserError, match="squared-relu: blocks of images support only dense"):
        FAMILIES["swin"].check(config)


def test_parallel_layers_have_no_norms_of_sums() -> None:
    config = tiny.config(Layout(), norm_order="post", **MODEL)
    with pytest.raises(UserError, match="model.norm_order=post: parallel layers need pre"):
        FAMILIES["parallel-gpt"].check(config)


def test_an_mlp_that_there_is_not_is_refused() -> None:
    model = jaxptd.ModelConfig(mlp="squared-rely")
    with pytest.raises(UserError, match="model.mlp=squared-rely: .*did you mean squared-relu?"):
        mlp_of(model)
    with pytest.raises(UserError, match="use dense"):
        mlp_of(jaxptd.ModelConfig(mlp="x"))


@pytest.mark.parametrize("name", ["dense", "squared-relu", "a b", ""])
def test_an_mlp_whose_name_is_taken_or_none_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="register_mlp: .*name"):
        register_mlp(name, MLPShape.of)


@pytest.mark.parametrize("name", ["gpt", "parallel-gpt", "a b", ""])
def test_a_family_whose_name_is_taken_or_none_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="register_family: .*name"):
        jaxptd.register_family(name, like="gpt")


def test_a_family_like_none_is_refused() -> None:
    with pytest.raises(UserError, match="no family lama; did you mean llama?"):
        jaxptd.register_family("own", like="lama")


def test_an_unknown_family_names_the_registered_one() -> None:
    with pytest.raises(UserError, match="parallel-gpt"):
        jaxptd.ModelConfig(family="parallel")  # type: ignore[arg-type]
