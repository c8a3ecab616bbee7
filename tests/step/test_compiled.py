"""Programs and batches that do not match the config are refused; numpy arrays are placed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxptd.analysis import verification
from jaxptd.errors import UserError
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program
from jaxptd.step.program import CompiledStep

RING = Layout(cp=2)


def changed(field: str, change) -> dict:
    batch = tiny.batch()
    return batch | {field: change(batch[field].copy())}


def with_id(field: str, number: int, dtype: type = np.int32) -> dict:
    """A batch with one id changed, in another dtype."""

    def put(x: np.ndarray) -> np.ndarray:
        x = x.astype(dtype)
        x[3, 5] = number
        return x

    return changed(field, put)


# ---- the program --------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [Layout(), Layout(dp=2), Layout(tp=2), Layout(cp=4)])
def test_a_mesh_of_another_layout_is_refused(mesh) -> None:
    with pytest.raises(UserError) as caught:
        Program(tiny.config(RING), make_mesh(mesh))
    assert "is not that of config.layout (cp=2 zigzag); use make_mesh(config.layout)" in str(
        caught.value
    )


def test_a_config_without_vocabulary_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size=null: .*with_vocabulary\(config\)"):
        tiny.program(RING, vocab_size=None)


def test_float64_needs_x64() -> None:
    with pytest.raises(UserError, match=r"model.dtype=float64: .*\"jax_enable_x64\", True"):
        tiny.program(RING, dtype="float64")
    with jax.enable_x64(True):
        assert tiny.program(RING, dtype="float64").resolved.master_dtype == jnp.float64


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("enabled", [True, False])
def test_verify_gives_itself_float64(dtype, enabled, monkeypatch) -> None:
    monkeypatch.setattr(verification, "_verify", lambda *_: jax.config.jax_enable_x64)
    with jax.enable_x64(enabled):
        assert verification.verify(tiny.config(RING), dtype=dtype) == (
            enabled or dtype == "float64"
        )
    assert not jax.config.jax_enable_x64


# ---- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (with_id("tokens", 13), "a batch holds tokens with 13; use 0 to 12, with model.vocab_size"),
        (with_id("tokens", -1), "a batch holds tokens with -1; use 0 to 12"),
        (with_id("tokens", 2**40, np.int64), "a batch holds tokens with 1099511627776; use 0 to"),
        (with_id("targets", 13), "a batch holds targets with 13; use -2147483648 to 12"),
        (with_id("targets", -(2**40), np.int64), "with -1099511627776; use -2147483648 to 12"),
        (changed("tokens", lambda x: x.astype(np.float32)), "tokens of float32; use an array of"),
        (changed("tokens", lambda x: x.astype(bool)), "tokens of bool; use an array of int32"),
        (changed("tokens", lambda x: x.astype(str)), "tokens of <U11; use an array of int32"),
        (changed("tokens", lambda x: x.astype(object)), "tokens of object; use an array of int32"),
        (changed("tokens", lambda x: x.tolist()), "tokens of list; use an array of int32"),
        (changed("tokens", lambda x: x[:4]), "a batch holds tokens (4, 8); use (8, 8)"),
        (changed("targets", lambda x: x[0]), "a batch holds targets (8,); use (8, 8)"),
        ({}, "a batch holds nothing; with data.documents=joined it holds tokens, targets"),
        ({1: np.zeros(3)}, "a batch holds 1; with data.documents=joined it holds tokens, targets"),
        ([1, 2], "a batch is a list; use a dict with tokens, targets"),
        (None, "a batch is a NoneType; use a dict with tokens, targets"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_batch_is_refused(batch, words) -> None:
    with pytest.raises(UserError) as caught:
        tiny.program(RING).place(batch)
    assert words in str(caught.value)


@pytest.mark.parametrize("step", ["train_step", "step_with_gradients", "eval_step"])
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (with_id("tokens", 13), "a batch holds tokens with 13; use 0 to 12"),
        (changed("tokens", jnp.asarray), "a batch mixes numpy arrays with others; use Program.pl"),
    ],
    ids=["id", "mixed"],
)
def test_a_step_refuses_a_batch_before_it_compiles(step, batch, words) -> None:
    with pytest.raises(UserError) as caught:
        getattr(tiny.program(RING), step)({}, batch)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[:4], r"tokens \(4, 8\); use \(8, 8\)"),
        (lambda x: x.astype(float), "of float32; use an array of int32"),
    ],
)
def test_arrays_on_devices_are_checked_when_the_step_is_traced(change, words) -> None:
    program = tiny.program(RING)
    batch = {name: change(x) for name, x in program.place(tiny.batch()).items()}
    with pytest.raises(UserError, match=words):
        program.train_step.trace(program.abstract_state, batch)
    with pytest.raises(UserError, match=words):
        program.train_step(program.abstract_state, batch)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_numpy_arrays_are_placed_in_the_order_of_the_ring(dtype) -> None:
    program = tiny.program(RING)
    batch = {name: x.astype(dtype) for name, x in tiny.batch().items()}
    step = CompiledStep(lambda arrays, batch: batch, program.place)
    order = program.batches.token_orders["tokens"]
    assert list(order) != sorted(order)
    for name, x in step({}, batch).items():
        assert x.sharding == program.batches.shardings[name]
        assert x.dtype == jnp.int32
        np.testing.assert_array_equal(np.asarray(x), tiny.batch()[name][:, order])


def test_arrays_on_devices_stay_as_they_are() -> None:
    program = tiny.program(RING)
    batch = dict.fromkeys(("tokens", "targets"), jnp.full((8, 8), 99))
    step = CompiledStep(lambda arrays, batch: batch, program.place)
    assert step({}, batch) is batch


def test_segments_may_have_any_number() -> None:
    config = tiny.config(RING, documents="apart")
    batch = tiny.batch() | {"segments": np.full((8, 8), 10**6)}
    placed = Program(config, make_mesh(RING)).place(batch)
    assert int(placed["segments"].max()) == 10**6
    with pytest.raises(UserError, match="segments with 4294967296; use -2147483648 to 2147483647"):
        Program(dataclasses.replace(config), make_mesh(RING)).place(
            batch | {"segments": np.full((8, 8), 2**32)}
        )
