"""A run's batches: prompts, padding and documents, in the order of the ring's devices."""

import dataclasses

import numpy as np
import pytest
import tiny

from jaxptd.config import DataConfig
from jaxptd.data import ShuffledWindows, WindowsInOrder, number_documents
from jaxptd.errors import UserError
from jaxptd.mesh import Layout
from jaxptd.run.evaluation import evaluated_samples, require_targets

TOKENS = np.random.default_rng(0).integers(0, tiny.VOCAB, 400)
COUNTED = np.random.default_rng(1).random(400) < 0.5
END = 5


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, cp=2), tiny.SEQUENCE_PARALLEL], ids=str)
def test_a_batch_has_the_targets_and_documents_of_its_samples(layout: Layout) -> None:
    windows = ShuffledWindows(TOKENS, 8, tiny.VOCAB, seed=0, counted=COUNTED)
    program = tiny.program(layout, documents="apart")
    batch = program.batches.of_samples(windows, 16, end_of_document=END, beyond=20)
    samples, order = np.arange(16, 24), program.batches.token_orders["tokens"]
    rows = windows.rows(samples)
    targets = np.where(samples[:, None] < 20, windows.targets(samples), -1)
    assert 0 < (targets[:4] < 0).sum() < 32
    assert (np.asarray(batch["tokens"]) == rows[:, :-1][:, order]).all()
    assert (np.asarray(batch["targets"]) == targets[:, order]).all()
    assert (np.asarray(batch["segments"]) == number_documents(rows[:, :-1], END)[:, order]).all()


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, balance="samples"),
        Layout(dp=2, cp=2, ring="gather", balance="tokens"),
        Layout(cp=2, ulysses=2, ring="gather", balance="tokens"),
    ],
    ids=str,
)
def test_an_arranged_batch_says_where_its_samples_and_tokens_are(layout: Layout) -> None:
    windows = ShuffledWindows(TOKENS, 8, tiny.VOCAB, seed=0, counted=COUNTED)
    batches = tiny.program(layout, documents="apart").batches
    plain = tiny.program(Layout(), documents="apart").batches
    held, given = (
        {name: np.asarray(x) for name, x in each.items()}
        for each in (x.of_samples(windows, 16, end_of_document=END) for x in (batches, plain))
    )
    assert sorted(held["sample"]) == [*range(8)]
    assert held["sample"].tolist() != [*range(8)]
    assert ("position" in held) == (layout.cp > 1)
    if layout.cp > 1:
        assert (np.sort(held["position"], 1) == np.arange(8)).all()
        assert len(np.unique(held["position"], axis=0)) > 1
    for name, x in given.items():
        assert (batches.as_given(name, held[name], held) == x).all(), name
    again = batches.of_samples(windows, 16, end_of_document=END)
    assert all((np.asarray(x) == held[name]).all() for name, x in again.items())


def test_arranged_replicas_have_equal_work() -> None:
    """Of eight samples, those of four long documents go to different devices."""
    layout = Layout(dp=4, balance="samples")
    program = tiny.program(layout, documents="apart", micro_batches=1)
    segments = np.tile(np.arange(8), (8, 1))
    segments[:4] = 0
    tokens = np.zeros((8, 8), np.int32)
    batch = program.place({"tokens": tokens, "targets": tokens, "segments": segments})
    assert np.asarray(batch["sample"]).reshape(4, 2).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_an_evaluation_needs_an_answer_among_its_sequences() -> None:
    config = tiny.config(Layout())
    train = dataclasses.replace(config.train, eval_batches=2)
    config = dataclasses.replace(config, train=train)
    prompts = dataclasses.replace(config, data=DataConfig(prompt_field="question"))
    for last, refused in ((128, True), (127, False)):  # the sequences have tokens 0 to 128
        counted = np.arange(400) > last
        windows = WindowsInOrder(TOKENS, 8, tiny.VOCAB, counted=counted)
        assert evaluated_samples(windows, train) == 16
        require_targets(windows, config, "")
        if refused:
            with pytest.raises(UserError, match="the 16 sequences of an evaluation hold only prom"):
                require_targets(windows, prompts, "")
        else:
            require_targets(windows, prompts, "")


def test_an_evaluation_reads_all_there_is_of_a_short_corpus() -> None:
    windows = WindowsInOrder(TOKENS[:50], 8, tiny.VOCAB)
    assert evaluated_samples(windows, tiny.config(Layout()).train) == 6
