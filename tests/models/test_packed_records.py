"""A step on packed records equals a step on one record per sequence, on one device and on any.

The other step knows nothing of documents: a record is a sequence, and padding follows it, which no
token before it sees.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from turns import slow

from jaxptd.analysis.comparison import Outcome, Tensors
from jaxptd.analysis.verification import OneStep
from jaxptd.data import NOT_COUNTED, WholeRecords
from jaxptd.mesh import Layout, make_mesh

LENGTH, END, SEED = 16, tiny.VOCAB - 1, 3
GROUPS = {"family": "llama", "num_kv_heads": 2}  # rotary positions
FOUR = {"num_layers": 4}
TWO_AHEAD = {"mtp.layers": 2}
# The balance loss takes shares of a sequence's choices, so it alone knows what shares a sequence.
EXPERTS = tiny.MOE | {"moe.balance_loss": 0.0, "moe.z_loss": 0.1}


@functools.cache
def data() -> WholeRecords:
    """Records of 4 to 17 tokens, some with ends inside, and prompts of up to half of each."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.integers(1, 24, 60) // rng.integers(1, 8, 60) + 4, LENGTH + 1)
    tokens, starts = rng.integers(0, tiny.VOCAB, lengths.sum()), np.cumsum(lengths) - lengths
    counted = np.concatenate([np.arange(n) >= rng.integers(0, n // 2 + 1) for n in lengths])
    return WholeRecords(tokens, starts + lengths, LENGTH, tiny.VOCAB, SEED, counted=counted)


def records_of_a_batch() -> np.ndarray:
    return np.concatenate([data().records(number) for number in range(8)])


def unpacked() -> dict[str, np.ndarray]:
    """One record of the batch in each sequence, written without the code under test."""
    rows, ends = records_of_a_batch(), data().ends
    tokens = np.zeros((len(rows), LENGTH), np.int32)
    targets = np.full((len(rows), LENGTH), NOT_COUNTED, np.int32)
    counted = data().counted
    assert isinstance(data().tokens, np.ndarray) and counted is not None
    for row, record in enumerate(rows):
        start, end = ends[record - 1] if record else 0, ends[record]
        ids = data().tokens[start:end]
        tokens[row, : len(ids) - 1] = ids[:-1]
        targets[row, : len(ids) - 1] = np.where(counted[start + 1 : end], ids[1:], NOT_COUNTED)
    return {"tokens": tokens, "targets": targets}


def run(program: Any, start: Tensors, batch: Any) -> Outcome:
    step = OneStep(program)
    step.__dict__["batch"] = batch
    return step.run(start)


def program_of(layout: Layout, **choice: Any) -> tiny.FromZeros:
    config = tiny.config(layout, seq_length=LENGTH, dtype="float64", **choice)
    return tiny.FromZeros(config, make_mesh(layout))


@functools.cache
def one_record_a_sequence(choice: tuple[tuple[str, Any], ...]) -> tuple[Tensors, Outcome]:
    size = len(records_of_a_batch())
    program = program_of(Layout(), batch=size, micro_batches=1, **dict(choice))
    start = tiny.random_params(program)
    return start, run(program, start, program.place(unpacked()))


ROTARY = GROUPS | TWO_AHEAD | {"window": 5}
CASES = [
    slow(Layout(), {}),
    (Layout(), ROTARY),
    (Layout(dp=2, tp=2, sequence_parallel=True, zero=3), {}),
    slow(Layout(dp=2, tp=2, sequence_parallel=True, zero=3), ROTARY),
    slow(Layout(pp=2), FOUR),
    slow(Layout(pp=2, cp=2, schedule="zb-h1"), FOUR | TWO_AHEAD),
    slow(Layout(cp=2), {}),
    slow(Layout(cp=2), ROTARY),
    (Layout(dp=2, cp=2, ring="gather", balance="tokens"), ROTARY),
    slow(Layout(cp=2, dp=2, ring="gather", balance="tokens"), {}),
    slow(Layout(dp=2, balance="samples"), {}),
    slow(Layout(ulysses=2, tp=2), {}),
    slow(Layout(ulysses=2), ROTARY),
    slow(Layout(row=2, col=2), GROUPS),
    (Layout(ep=2), EXPERTS),
    slow(Layout(dp=2, ep=2, tp=2, zero=3), EXPERTS),
    slow(Layout(ep=2, cp=2, ring="gather", balance="tokens"), EXPERTS | TWO_AHEAD),
]


@pytest.mark.parametrize(("layout", "choice"), CASES, ids=str)
def test_a_step_equals_one_on_a_record_a_sequence(layout: Layout, choice: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        start, expected = one_record_a_sequence(tuple(choice.items()))
        program = program_of(layout, documents="whole", **choice)
        batch = program.batches.of_samples(data(), 0, end_of_document=END)
        found = run(program, start, batch)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert set(found.gradients) == set(expected.gradients)
    for name, x in expected.gradients.items():
        if name.endswith("load_bias"):  # a number of choices, those of padding included
            continue
        np.testing.assert_allclose(
            found.gradients[name], x, rtol=0, atol=1e-12 * max(1, np.abs(x).max()), err_msg=name
        )


def test_the_batch_has_several_records_a_sequence() -> None:
    """Else the tests above compare a batch with itself."""
    assert len(records_of_a_batch()) > 2 * 8
    padding = data().documents(np.arange(8), END) < 0
    assert 0 < padding.mean() < 0.2
    assert len({*data().packing.tokens[records_of_a_batch()].tolist()}) > 5
