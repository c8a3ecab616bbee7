"""The step: equal results however computed, a single gradient reduction, its errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contract import relative
from turns import slow

from jaxptd.analysis.count import collectives_of
from jaxptd.analysis.jaxprs import equations
from jaxptd.errors import UserError
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program, batch_fields


def gradients(program) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and canonical gradients of the first step."""
    _, metrics, grads = program.step_with_gradients(program.init_state(), tiny.batch())
    return float(metrics["loss"]), jax.tree.map(np.asarray, program.canonical(grads))


@functools.cache
def reference() -> Any:
    return gradients(tiny.program(Layout(), dropout=0.1))


CHOICES = [
    slow({"remat": "full"}),
    slow({"remat": "dots"}),
    slow({"remat": "attention"}),
    slow({"scan_layers": False}),
    slow({"vocab_multiple": 128}),
    slow({"scan_layers": False, "remat": "dots", "vocab_multiple": 128}),
    slow({"micro_batches": 1}),
    slow({"micro_batches": 4, "remat": "attention"}),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_choices_of_computation_do_not_change_the_gradients(choice: dict) -> None:
    layout = tiny.SEQUENCE_PARALLEL
    loss, grads = gradients(tiny.program(layout, dropout=0.1, **choice))
    assert loss == pytest.approx(reference()[0], rel=1e-6)
    assert {name: relative(grads[name], want) for name, want in reference()[1].items()} == {
        name: pytest.approx(0, abs=1e-6) for name in grads
    }


@pytest.mark.slow
def test_an_output_layer_of_its_own_has_its_own_gradient() -> None:
    one, sharded = (
        gradients(tiny.program(layout, tie_embeddings=False))
        for layout in (Layout(), tiny.SEQUENCE_PARALLEL)
    )
    assert one[1]["head.table"].shape == (tiny.VOCAB, 16)
    assert relative(one[1]["head.table"], one[1]["tokens.table"]) > 0.1
    for name, want in one[1].items():
        assert relative(sharded[1][name], want) <= 1e-6, name


@pytest.mark.slow
def test_bfloat16_keeps_float32_masters_and_sums() -> None:
    program = tiny.program(tiny.SEQUENCE_PARALLEL, dtype="bfloat16")
    state, metrics, grads = program.step_with_gradients(program.init_state(), tiny.batch())
    kept = (*state["params"].values(), *grads.values(), *jax.tree.leaves(state["optimizer"])[1:])
    assert {x.dtype for x in kept} == {jnp.dtype("float32")}
    assert float(metrics["loss"]) == pytest.approx(reference()[0], rel=0.02)
    reduced = [
        v.aval.dtype
        for equation in equations(
            program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr
        )
        if equation.primitive.name == "psum_invariant" and "dp" in equation.params["axes"]
        for v in equation.invars
    ]
    assert reduced.count(jnp.dtype("float32")) >= len(grads)
    assert jnp.dtype("bfloat16") not in reduced


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_gradients_are_reduced_once_whatever_the_micro_batches(micro_batches: int) -> None:
    program = tiny.program(Layout(dp=2, tp=4), micro_batches=micro_batches)
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    (over_dp,) = (c for c in collectives_of(traced.jaxpr, program.mesh) if c.axes == ("dp",))
    blocks = sum(
        np.prod(x.sharding.shard_shape(x.shape)) for x in program.abstract_state["params"].values()
    )
    assert over_dp.bytes == 4 * blocks + 4 + 4  # the gradients, the count of targets, the loss


@pytest.mark.slow
def test_masked_targets_leave_the_mean_of_the_others() -> None:
    """Devices have different numbers of targets, so a mean of means would be wrong."""
    batch = tiny.batch()
    targets = batch["targets"].copy()
    targets[:3] = -1
    targets[3, 2:] = -1
    losses = []
    for layout in (Layout(), Layout(dp=2, tp=2)):
        program = tiny.program(layout)
        _, metrics = program.train_step(program.init_state(), {**batch, "targets": targets})
        losses.append(float(metrics["loss"]))
    program = tiny.program(Layout())
    sums = program.eval_step(program.init_state()["params"], {**batch, "targets": targets})
    number, loss = (sums["cross_entropy"][name] for name in ("targets", "sum"))
    assert int(number) == (targets >= 0).sum()
    assert losses == pytest.approx([float(loss) / int(number)] * 2, rel=1e-6)


def test_an_evaluation_counts_every_target_once_on_any_layout() -> None:
    """Zero parameters give every token the same probability."""
    made = tiny.program(Layout(dp=2, cp=2, tp=2))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), made.abstract_state["params"])
    shardings = jax.tree.map(lambda x: x.sharding, made.abstract_state["params"])
    sums = made.eval_step(jax.device_put(zeros, shardings), tiny.batch())["cross_entropy"]
    assert int(sums["targets"]) == 64
    assert float(sums["sum"]) == pytest.approx(64 * np.log(tiny.VOCAB))


@pytest.mark.slow
def test_dropout_differs_from_step_to_step_and_is_off_in_evaluation() -> None:
    program = tiny.program(Layout(), dropout=0.5)
    state = program.init_state()
    first = program.step_with_gradients(state, tiny.batch())[1]["loss"]
    later = {**state, "step": jnp.int32(1)}
    assert float(first) != float(program.step_with_gradients(later, tiny.batch())[1]["loss"])
    sure = tiny.program(Layout()).eval_step(state["params"], tiny.batch())
    assert program.eval_step(state["params"], tiny.batch()) == sure


@pytest.mark.parametrize("layout", [Layout(tp=4), slow(Layout(tp=2)), slow(Layout(dp=4))], ids=str)
def test_every_layout_starts_from_the_same_bits(layout: Layout) -> None:
    def start(layout: Layout) -> dict[str, np.ndarray]:
        program = Program(tiny.config(layout), make_mesh(layout))
        return program.canonical(program.init_state()["params"])

    for name, want in start(Layout()).items():
        np.testing.assert_array_equal(start(layout)[name], want, err_msg=name)


def test_initial_weights_are_normal() -> None:
    """GPT-2's 0.02, smaller for matmuls into the residual stream; norms are 1, biases 0."""
    config = tiny.config(Layout(), hidden_size=64, seq_length=64, vocab_size=500)
    program = Program(config, make_mesh(config.layout))
    params = program.init_state()["params"]
    table = np.asarray(params["tokens.table"]) / 0.02
    assert table.std() == pytest.approx(1, abs=0.02)
    assert (np.abs(table) > 1.96).mean() == pytest.approx(0.05, abs=0.005)
    assert np.asarray(params["blocks.mlp.down.w"]).std() == pytest.approx(0.01, abs=3e-4)
    assert (np.asarray(params["norm.w"]) == 1).all()
    assert (np.asarray(params["blocks.mlp.up.b"]) == 0).all()
    one, other = np.asarray(params["blocks.mlp.up.w"])
    assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.05


def test_cudnn_on_a_machine_without_it_is_an_error_that_names_the_alternative() -> None:
    with pytest.raises(UserError, match=r"model\.attention=cudnn: .*use model\.attention=xla"):
        _ = tiny.program(Layout(), attention="cudnn").resolved


@pytest.mark.parametrize("layout", [slow(Layout()), slow(Layout(cp=4))], ids=str)
def test_a_document_does_not_depend_on_the_ones_before_it(layout: Layout) -> None:
    """The loss of the second document does not depend on the tokens of the first."""
    fields = tiny.batch()
    targets = np.where(np.arange(8) < 5, -1, fields["targets"])
    segments = np.broadcast_to(np.arange(8) >= 5, (8, 8)).astype(np.int32)
    others = np.where(np.arange(8) < 5, (fields["tokens"] + 1) % tiny.VOCAB, fields["tokens"])

    def loss(documents: str, tokens: np.ndarray) -> float:
        program = tiny.program(layout, documents=documents)
        batch = {"tokens": tokens, "targets": targets, "segments": segments}
        batch = {name: batch[name] for name in batch_fields(program.config)}
        params = program.init_state()["params"]
        return float(program.eval_step(params, program.place(batch))["cross_entropy"]["sum"])

    assert loss("apart", others) == loss("apart", fields["tokens"])
    assert loss("joined", others) != loss("joined", fields["tokens"])


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"tokens": (8, 8)}, "holds tokens; with data.documents=joined it holds tokens, targets"),
        (
            {"tokens": (8, 8), "targets": (8, 9)},
            r"holds targets \(8, 9\); use \(8, 8",
        ),
        ({"tokens": (4, 8), "targets": (8, 8)}, r"holds tokens \(4, 8\); use"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch: dict, words: str) -> None:
    arrays = {name: np.zeros(shape, np.int32) for name, shape in batch.items()}
    with pytest.raises(UserError, match=words):
        tiny.program(Layout(cp=2)).place(arrays)


def test_segments_are_neither_forgotten_nor_ignored() -> None:
    batch = tiny.batch()
    segments = np.zeros((8, 8), np.int32)
    for documents, given in (("apart", batch), ("joined", {**batch, "segments": segments})):
        program = tiny.program(Layout(), documents=documents)
        with pytest.raises(UserError, match=f"data.documents={documents} it holds"):
            program.train_step(program.init_state(), given)


@pytest.mark.slow
def test_rsa_on_one_device_is_attention_in_chunks() -> None:
    def products(ring: str) -> set[tuple[int, ...]]:
        program = tiny.program(Layout(ring=ring), micro_batches=1)
        traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
        made = (e.outvars[0] for e in equations(traced.jaxpr) if e.primitive.name == "dot_general")
        return {variable.aval.shape for variable in made}

    assert products("rsa") == products("zigzag")
