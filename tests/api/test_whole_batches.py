"""Whole batches of every family: padding is ignored, losses have names, misfits are refused."""

import copy
from typing import get_args

import jax
import numpy as np
import pytest
import tiny
from turns import slow

from jaxptd import Config, DataConfig, Layout, ModelConfig, UserError
from jaxptd.api.whole_batches import LossAndGradients, WholeBatch, WholeBatches
from jaxptd.config import Documents, FamilyName
from jaxptd.models.families import FAMILIES, family_of
from jaxptd.step import Program

BERT = {"family": "bert", "dtype": "float64", "max_positions": 8}
T5 = {"family": "t5", "dtype": "float64"}
APART = {"documents": "apart", "dtype": "float64", "max_positions": 8}
SHORT = 5  # positions in a batch, out of 8; a second sequence has 4


def lengths(program: Program) -> dict[str, int]:
    """Lengths of a batch, by the field of `ModelConfig` that sets the model's length."""
    fields = family_of(program.config.model).given(program.config).values()
    return {name: SHORT - i for i, name in enumerate({x.length: 0 for x in fields if x.length})}


def short(program: Program, rows: int = 3) -> dict[str, np.ndarray]:
    """Draws a batch of the model's family and keeps a few sequences, cut short."""
    config, family, kept = program.config, family_of(program.config.model), lengths(program)
    drawn = family.draw(config, np.random.default_rng(4))
    return {
        name: drawn[name][:rows, : kept[field.length]].astype(np.int64)
        if field.length
        else drawn[name][:rows]
        for name, field in family.given(config).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(), BERT),
        slow(Layout(dp=2, tp=2), BERT),
        slow(Layout(pp=2, dp=2), BERT),
        slow(Layout(dp=2, tp=2), T5),
        slow(Layout(cp=2, row=2, col=2), T5),
        slow(Layout(cp=2, row=2, col=2), BERT),
        slow(Layout(dp=2), APART),
        slow(Layout(cp=2), APART),
        slow(Layout(cp=2), APART | {"mtp.layers": 2}),
    ],
    ids=str,
)
def test_losses_are_those_of_the_sequences_without_padding(layout: Layout, choice: dict) -> None:
    """Compares with a one-device program built for sequences of that length."""
    with jax.enable_x64(True):
        program = tiny.program(layout, **choice)
        batch = short(program)
        sizes = {**choice, **lengths(program)}
        own = tiny.program(Layout(), batch=3, micro_batches=1, **sizes)
        state = program.init_state()
        expected = state if layout == Layout() else own.init_state()  # the same parameters
        found = WholeBatches(program).loss_and_gradients(state, batch)
        _, metrics, gradients = own.step_with_gradients(expected, batch)
        wanted = own.canonical(gradients)
    loss, by_name = found
    assert loss == pytest.approx(float(metrics["loss"]), rel=1e-12)
    assert set(found.losses) == set(family_of(own.config.model).losses(own.config.model))
    for name, value in found.losses.items():
        assert value == pytest.approx(float(metrics.get(name, loss)), rel=1e-12)
    assert sum(found.losses.values()) == pytest.approx(loss, rel=1e-12)
    assert set(by_name) == set(wanted)
    for name, x in wanted.items():
        np.testing.assert_allclose(by_name[name], x, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int64])
def test_ids_of_any_whole_numbers_are_padded_alike(kind: type) -> None:
    """Tokenizers return uint16, which cannot hold -1, the padding of targets."""
    program = tiny.program(Layout())
    state, batch = program.init_state(), short(program, rows=2)
    batch = {name: np.abs(x) for name, x in batch.items()}
    whole = WholeBatches(program)
    expected = whole.loss_and_gradients(state, batch).loss
    given = {name: x.astype(kind) for name, x in batch.items()}
    assert whole.loss_and_gradients(state, given).loss == expected


def refuse(whole: WholeBatches, batch: WholeBatch, line: str) -> None:
    with pytest.raises(UserError) as error:
        whole.loss_and_gradients({}, batch)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_batches_of_another_kind_are_refused_before_anything_is_compiled() -> None:
    program = tiny.program(Layout(), family="bert")
    whole, good = WholeBatches(program), short(program)
    tokens, mask, pairs = (good[name] for name in ("tokens", "mask", "next_sentence"))
    without = {name: x for name, x in good.items() if name != "mask"}
    refuse(
        whole, without, "a batch is a dict with tokens [B, T], token_types [B, T], mask [B, T], t"
    )
    refuse(whole, [tokens], "a batch is a dict with tokens [B, T]")  # type: ignore[arg-type]
    refuse(
        whole, good | {"segments": mask}, "a batch holds segments, but with model.family=bert, da"
    )
    refuse(whole, good | {"mask": mask > 0}, "a batch holds mask of bool [3, 5]; use ints [B, T]")
    refuse(whole, good | {"mask": mask[0]}, "a batch holds mask of int64 [5]; use ints [B, T]")
    refuse(
        whole, good | {"next_sentence": mask}, "a batch holds next_sentence of int64 [3, 5]; use"
    )
    refuse(
        whole, good | {"next_sentence": pairs[:2]}, "a batch holds next_sentence [2], but tokens ["
    )
    refuse(
        whole, good | {"mask": mask[:, 1:]}, "a batch holds mask [3, 4], but tokens [3, 5], token_t"
    )
    refuse(whole, good | {"mask": mask + 1}, "a batch holds mask with 2; use 0 to 1")
    refuse(whole, good | {"tokens": tokens + 2**32}, "a batch holds tokens with 4294967")
    refuse(whole, good | {"next_sentence": 0 * pairs - 1}, "a batch has no valid target in next_")
    empty = {name: x[:0] for name, x in good.items()}
    refuse(whole, empty, "a batch holds tokens of int64 [0, 5]; use ints [B, T]")
    twice = {name: x if x.ndim == 1 else np.tile(x, 2) for name, x in good.items()}
    refuse(whole, twice, "a batch has 10 positions in tokens; use at most model.seq_length=8")
    with pytest.raises(
        UserError, match="model.family=bert: only models that continue text have lo"
    ):
        whole.logits({}, good)


@pytest.mark.parametrize("documents", get_args(Documents))
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_no_target_of_any_family(family: FamilyName, documents: Documents) -> None:
    model = ModelConfig(family=family, vocab_size=13)
    config = Config(model, data=DataConfig(documents=documents))
    row = family_of(model)
    fields = row.given(config)
    dims = {name: 1 + len(each.sizes) for name, each in fields.items()}
    padding = {
        name: each.padded(np.zeros((0,) * dims[name], each.dtype), (1,) * dims[name]).item()
        for name, each in fields.items()
    }
    assert all(padding[loss.targets] < 0 for loss in row.losses(model).values())
    numbers = [each.documents(padding) for each in row.sequences]
    assert all(number is None or number < 0 for number in numbers)


def test_a_result_is_a_pair_with_its_losses() -> None:
    found = LossAndGradients(1.5, {"w": np.ones(2)}, {"mlm": 1.0, "nsp": 0.5})
    loss, gradients = found
    assert (loss, gradients) == (found.loss, found.gradients)
    assert copy.copy(found).losses == {"mlm": 1.0, "nsp": 0.5}
    assert repr(found) == "loss 1.5 (mlm=1, nsp=0.5) and 1 gradients"
