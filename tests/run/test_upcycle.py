"""Experts that start as copies of a dense model's MLP, from checkpoints or Hugging Face."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from hugging import random_directory
from turns import slow

from jaxptd import (
    CheckpointConfig,
    Config,
    Layout,
    ModelConfig,
    Program,
    TrainConfig,
    UserError,
    make_mesh,
)
from jaxptd.config import nested
from jaxptd.hf.directory import Directory
from jaxptd.hf.load import check, config_of, first_state
from jaxptd.hf.read import read_params
from jaxptd.run.checkpoints import RunCheckpoints
from jaxptd.run.folder import RunDir

LLAMA: dict[str, Any] = {"family": "llama", "num_layers": 4, "num_kv_heads": 2}
# Two experts in every second layer, so that each stack has one layer.
MIXTRAL: dict[str, Any] = LLAMA | {"family": "mixtral", "moe.num_experts": 4}
MIXTRAL |= {"rope.theta": 1e4, "moe.upcycle": True}
SPARSE = {"moe.every": 2}
LAYOUTS = [
    (Layout(), {}),
    pytest.param(Layout(ep=2, tp=2), SPARSE, marks=pytest.mark.slow),
    (Layout(dp=2, ep=4, zero=3), {}),
    (Layout(pp=2, ep=2, tp=2, zero=1), SPARSE),
]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A dense model's run, and its parameters."""
    made, path = tiny.program(Layout(tp=2), **LLAMA), tmp_path_factory.mktemp("dense")
    state = made.init_state()
    save(made, state, path)
    return path, arrays(made, state["params"])


def save(made: Program, state: Any, path: Path) -> None:
    checkpoints = RunCheckpoints(made, RunDir(path), print)
    checkpoints.save(state, 0, None)
    checkpoints.store.wait()


def arrays(program: Program, params: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in program.canonical(params).items()}


def program(layout: Layout, start: Path | None, **model: Any) -> Program:
    config = tiny.config(layout, batch=16, **(MIXTRAL | model))
    checkpoint = CheckpointConfig(start=start and str(start))
    return Program(dataclasses.replace(config, checkpoint=checkpoint), make_mesh(layout))


def check_copies(
    found: dict[str, np.ndarray], dense: dict[str, np.ndarray], drawn: dict[str, np.ndarray]
) -> None:
    """Asserts that routers have the drawn parameters, and all others equal the dense model's."""
    used = set()
    for name, x in found.items():
        stack, _, rest = name.partition(".")
        if rest.startswith("mlp.router."):
            np.testing.assert_array_equal(x, drawn[name])
            assert rest.endswith("load_bias") == (not x.any())
            continue
        first = int(stack.partition("_")[2] or 0)
        source = f"blocks.{rest}" if stack.startswith("blocks") else name
        expected = dense[source]
        if stack.startswith("blocks"):
            expected = expected[first : first + len(x)]
        if x.ndim > expected.ndim:
            expected = np.broadcast_to(expected[:, None], x.shape)
        np.testing.assert_array_equal(x, expected, name)
        used.add(source)
    assert used == set(dense)


@functools.cache
def drawn(model: tuple[tuple[str, Any], ...]) -> dict[str, np.ndarray]:
    """What a model with experts begins with on one device if it copies nothing."""
    one = program(Layout(), None, **dict(model), **{"moe.upcycle": False})
    return arrays(one, one.init_state()["params"])


@pytest.mark.parametrize(("layout", "model"), LAYOUTS, ids=lambda x: str(x))
def test_each_expert_is_a_copy_and_routers_are_drawn(dense, layout, model) -> None:
    path, params = dense
    made = program(layout, path, **model)
    state = first_state(made, say=lambda line: None)
    check_copies(arrays(made, state["params"]), params, drawn(tuple(model.items())))
    for name, x in state["params"].items():
        assert x.sharding == made.abstract_state["params"][name].sharding, name
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state["optimizer"]))


@pytest.mark.parametrize(
    "layout", [Layout(ep=2, tp=2), *map(slow, (Layout(), Layout(ep=2, tp=4, zero=3)))], ids=str
)
def test_biases_of_experts_are_copies(tmp_path: Path, layout: Layout) -> None:
    """Devices along tp have slices of an expert's second bias, and all of a dense MLP's."""
    sizes = {"linear_bias": "all", "hidden_size": 18, "head_size": 4}
    made = tiny.program(Layout(tp=2), **LLAMA | sizes)
    state = made.init_state()
    params = dict(state["params"])
    for name in (name for name in params if name.endswith(".b")):
        x = np.arange(params[name].size, dtype=np.float32).reshape(params[name].shape)
        params[name] = jax.device_put(x, params[name].sharding)
    save(made, {**state, "params": params}, tmp_path)
    upcycled = program(layout, tmp_path, **sizes)
    found = arrays(upcycled, first_state(upcycled, say=lambda line: None)["params"])
    drawn = arrays(upcycled, upcycled.init_state()["params"])
    check_copies(found, arrays(made, params), drawn)
    assert np.ptp(found["blocks.mlp.down.b"]) > 0


def test_a_device_reads_only_the_slices_that_its_own_are_copies_of(dense, monkeypatch) -> None:
    from jaxptd.run import saved

    sizes, load = dict[str, int](), saved.load_part

    def noted(path: Path, target: Any) -> Any:
        for name, x in target["params"].items():
            sizes[name] = int(np.prod(x.sharding.shard_shape(x.shape)))
        return load(path, target)

    monkeypatch.setattr(saved, "load_part", noted)
    path, params = dense
    first_state(program(Layout(pp=2, ep=2, tp=2), path), say=lambda line: None)
    for name in ("blocks.mlp.up.w", "blocks.mlp.down.w", "blocks.attention.q.w"):
        assert sizes[name] == params[name].size / 4, name


REFUSED = [
    ({"moe.upcycle": False}, r"DENSE/checkpoints/00000000 has no experts, .*model.moe.upcycle=tr"),
    ({"rope.theta": 1e5}, r"model.rope.theta=100000.0, but checkpoint.start=DENSE.* has 10000"),
    ({"ffn_hidden_size": 32}, r"model.ffn_hidden_size=32, but checkpoint.start=DENSE.* has 64"),
    ({"moe.ffn_hidden_size": 32}, r"model.moe.ffn_hidden_size=32, but .*start=DENSE.* has 64"),
    (SPARSE | {"moe.ffn_hidden_size": 32}, r"both kinds of layers begin as .* one dense model"),
    ({"num_kv_heads": 4}, r"model.num_kv_heads=4, but checkpoint.start=DENSE.* has 2"),
]


@pytest.mark.parametrize(("model", "line"), REFUSED, ids=lambda x: str(x)[:40])
def test_other_weights_are_refused_in_a_line(dense, model, line) -> None:
    path, _ = dense
    with pytest.raises(UserError, match=line.replace("DENSE", str(path))):
        first_state(program(Layout(), path, **model), say=print)


def test_without_weights_and_with_those_of_experts_it_is_refused(dense, tmp_path) -> None:
    with pytest.raises(UserError, match=r"checkpoint.start=null: there are no weights to copy"):
        first_state(program(Layout(), None), say=print)
    with pytest.raises(UserError, match=r"a dense model has no weights for a shared MLP"):
        program(Layout(), None, **{"moe.shared_ffn_hidden_size": 64})
    made = program(Layout(), dense[0])
    state = first_state(made, say=lambda line: None)
    save(made, state, tmp_path)
    with pytest.raises(UserError, match="has experts already; leave upcycle out"):
        first_state(program(Layout(), tmp_path), say=print)
    changed = {"moe.upcycle": False, "moe.bias_rate": 0.1, "moe.chunk": 2.0}
    again = program(Layout(ep=2), tmp_path, **changed)
    found = arrays(again, first_state(again, say=lambda line: None)["params"])
    for name, x in arrays(made, state["params"]).items():
        np.testing.assert_array_equal(found[name], x)


# ---- Hugging Face directories, and the loss ------------------------------------------------------

SIZES = {"vocab_size": 13, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8}
PAIRS = {"llama": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "upcycle": True}
PLAIN = {"shared_ffn_hidden_size": 0, "shared_gate": False, "normalize": True}


# Qwen's models differ in options that size checks compare.
FAMILIES = [*PAIRS][:1] + [pytest.param(name, marks=pytest.mark.slow) for name in [*PAIRS][1:]]


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory) -> Directory:
    config = {"model_type": request.param, **SIZES}
    config |= {"head_dim": 4} if request.param == "qwen3" else {}
    return Directory(random_directory(tmp_path_factory.mktemp("hf") / request.param, config))


def upcycled(directory: Directory, layout: Layout, **moe: Any) -> Program:
    """The program for a directory's model with experts."""
    config = config_of(directory, dtype="float64")
    family: Any = PAIRS[config.model.family]
    made: Any = nested(dataclasses.asdict(config.model))
    model = ModelConfig(**{**made, "family": family, "moe": EXPERTS | PLAIN | moe})
    train = TrainConfig(global_batch_size=8)
    whole = Config(model, layout, config.data, train=train, checkpoint=config.checkpoint)
    return Program(whole, make_mesh(layout))


def loss(program: Program, params: Any) -> float:
    found = program.eval_step(params, tiny.batch())["cross_entropy"]
    return float(found["sum"] / found["targets"])


def test_the_first_loss_is_the_dense_models(directory: Directory) -> None:
    """A token's experts have weights that sum to 1, and all compute the same."""
    with jax.enable_x64(True):
        config = config_of(directory, dtype="float64")
        train = dataclasses.replace(config.train, global_batch_size=8)
        one = Program(dataclasses.replace(config, train=train), make_mesh(Layout()))
        expected = loss(one, read_params(one, directory))
        for layout in (Layout(), Layout(ep=2, tp=2)):
            made = upcycled(directory, layout)
            state = first_state(made, say=lambda line: None)
            assert loss(made, state["params"]) == pytest.approx(expected, rel=1e-14, abs=0)


def test_a_directory_without_experts_names_the_option(directory: Directory) -> None:
    family = directory.config["model_type"]
    with jax.enable_x64(True):
        made = upcycled(directory, Layout())
        check(made.config.model, directory.path)
        plain = upcycled(directory, Layout(), upcycle=False)
        with pytest.raises(UserError, match=f"{family} has no experts.*--model.moe.upcycle=true"):
            check(plain.config.model, directory.path)
        with pytest.raises(UserError, match=f"{family} has no experts.*--model.moe.upcycle=true"):
            first_state(plain, say=print)
        other = upcycled(directory, Layout(), ffn_hidden_size=32)
        with pytest.raises(
            UserError, match=r"model.moe.ffn_hidden_size=32, but .* has 24; use --model.moe.ffn_"
        ):
            first_state(other, say=print)
