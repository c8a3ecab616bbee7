"""Loss, gradients and logits equal those of transformers in float64, on any layout."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from hugging import gpt2_tensors, reference, write_directory
from turns import slow

import jaxptd
from jaxptd import Layout, UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "gpt2.json"
LENGTH = 11
LAYOUTS = [
    slow(Layout()),
    slow(Layout(dp=2, cp=2, tp=2, sequence_parallel=True)),  # pads heads, and 11 tokens up to 16
    Layout(dp=2, tp=3),
    slow(Layout(row=2, col=2, attention2d="blocks")),
    slow(Layout(pp=2, dp=2)),
    slow(Layout(pp=2, schedule="zb-v", virtual_stages=2)),
    slow(Layout(dp=2, cp=2, zero=3)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_numbers_are_those_of_transformers(gpt2: Path, layout: Layout) -> None:
    golden, batch = json.loads(GOLDEN.read_text()), reference.batch(13, LENGTH)
    with jax.enable_x64(True):
        run = jaxptd.from_hf(gpt2, layout=layout, dtype="float64", platform="cpu")
        loss, gradients = run.loss_and_gradients(batch)
        found = jaxptd.hf.names(run.program, gradients)
    assert abs(loss - golden["loss"]) < 1e-12
    reference.check_summaries(found, golden["gradients"])


def test_logits_are_those_of_transformers(gpt2: Path) -> None:
    golden, batch = json.loads(GOLDEN.read_text()), reference.batch(13, LENGTH)
    with jax.enable_x64(True):
        run = jaxptd.from_hf(gpt2, dtype="float64", platform="cpu")
        logits = run.logits(batch)
        assert run.step == 0
        assert "5 layers" in repr(run)
        parameters = jaxptd.hf.names(run.program, run.state["params"])
    assert logits.shape == (3, LENGTH, 13)
    expected = golden["logits"]
    np.testing.assert_allclose(
        reference.summary(logits), expected, rtol=0, atol=1e-11 * expected[0]
    )
    for name, x in gpt2_tensors().items():
        np.testing.assert_array_equal(parameters[name], x)
    for wrong, line in (
        (
            {"tokens": batch["tokens"]},
            "a batch is a dict with tokens [B, T], targets [B, T], numpy",
        ),
        (
            batch | {"targets": batch["targets"][:, 1:]},
            "a batch holds targets [3, 10], but tokens [3,",
        ),
        (batch | {"tokens": batch["tokens"] * 1.0}, "a batch holds tokens of float64 [3, 11]; use"),
        (
            batch | {"tokens": batch["tokens"] + 9},
            "a batch holds tokens with 21; use 0 to 12, with",
        ),
        (
            batch | {"targets": batch["targets"] * 0 - 1},
            "a batch has no valid target in targ",
        ),
        ({name: np.tile(x, 2) for name, x in batch.items()}, "a batch has 22 positions in tokens;"),
    ):
        with pytest.raises(UserError) as error:
            run.loss_and_gradients(wrong)
        assert str(error.value).startswith(line)


SLOW_LAYOUTS = [
    Layout(),
    Layout(dp=2, tp=2, sequence_parallel=True),
    Layout(row=2, col=2),
    Layout(pp=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW_LAYOUTS, ids=str)
def test_transformers_itself_agrees(tmp_path: Path, layout: Layout) -> None:
    """Compares every element of every gradient with transformers, run here."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 24, "n_head": 4, "n_positions": 20, "vocab_size": 37}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    model, batch = reference.load(tmp_path), reference.batch(37, 13, rows=2)
    expected_loss, expected = reference.loss_and_gradients(model, batch)
    with jax.enable_x64(True):
        run = jaxptd.from_hf(tmp_path, layout=layout, dtype="float64", platform="cpu")
        loss, gradients = run.loss_and_gradients(batch)
        found = jaxptd.hf.names(run.program, gradients)
    assert abs(loss - expected_loss) < 1e-12
    assert set(found) == set(expected)
    for name, x in expected.items():
        error = np.linalg.norm(found[name] - x) / np.linalg.norm(x)
        assert error < 1e-10, f"{name}: {error:.1e}"


@pytest.mark.slow
def test_a_table_of_another_order_is_told_apart(gpt2: Path) -> None:
    """Rows in the stages' order have the same shape as in layer order if stages are equal."""
    layout = Layout(pp=2, schedule="interleaved", virtual_stages=2)
    tensors = {name: x for name, x in gpt2_tensors().items() if ".h.4." not in name}
    folder = write_directory(gpt2.parent / "four", tensors, n_layer=4)
    run = jaxptd.from_hf(folder, layout=layout, platform="cpu")
    name = "blocks.mlp.down.w"
    x = run.state["params"][name]
    with pytest.raises(UserError, match=f"{name} has this shape both in canonical form and in the"):
        jaxptd.hf.names(run.program, {name: x})
    canonical = run.program.canonical({name: x})
    for found in (
        jaxptd.hf.names(run.program, {name: np.asarray(canonical[name])}),
        jaxptd.hf.names(run.program, canonical, is_canonical=True),
        jaxptd.hf.names(run.program, {name: x}, is_canonical=False),
    ):
        assert len(found) == 4
        for each, tensor in found.items():
            np.testing.assert_array_equal(tensor, tensors[each])
    for wrong, line in (({"x": x}, "the model has no parameter x"), ({name: x[1:]}, f"{name} is ")):
        with pytest.raises(UserError, match=line):
            jaxptd.hf.names(run.program, wrong)
