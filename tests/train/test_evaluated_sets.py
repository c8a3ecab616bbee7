"""A run with sets to evaluate on: their losses, on every layout, and after a kill."""

import numpy as np
import pytest
from runs import CONTEXT, DP2_TP2, Killed, kill_after, numbers

import jaxptd
from jaxptd.run.evaluation import evaluated_samples
from jaxptd.train import main

NAMES = [
    f"{key}{end}" for end in ("", "/law", "/poem") for key in ("validation_loss", "perplexity")
]


def sets(folder) -> str:
    """The option with two sets, neither of whole batches."""
    (folder / "law.txt").write_text("No one may be a judge in his own cause. " * 15)
    (folder / "poem.txt").write_text("The woods are lovely, dark and deep. " * 4)
    files = ", ".join(f"{name}: {folder}/{name}.txt" for name in ("poem", "law"))
    return f"--data.validation={{{files}}}"


def test_each_set_has_its_own_loss_on_every_layout_and_after_a_kill(train, monkeypatch) -> None:
    option = sets(train.folder)
    exact = "--model.dropout=0"  # which `loss_and_gradients` would draw
    out = train(option, exact, *DP2_TP2, f"--train.run_dir={train.folder}/other").out
    assert "validation law " in out and "validation poem " in out
    other = jaxptd.load(train.folder / "other")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(9, patch)
        main([*train.options, option, exact])
    train(option, exact, *CONTEXT)
    rows, expected = (numbers(each.metrics()) for each in (train.run_dir, other.run_dir))
    assert [name for name in rows[-1] if "validation" in name or "perplexity" in name] == NAMES
    for row, want in zip(rows, expected, strict=True):
        assert row == pytest.approx(want, rel=1e-5)
    for name, windows in other.data.sets.items():
        rows_nT = windows.rows(np.arange(evaluated_samples(windows, other.config.train)))
        batch = {"tokens": rows_nT[:, :-1], "targets": rows_nT[:, 1:]}
        loss = float(other.loss_and_gradients(batch).loss)
        assert other.evaluate()[f"validation_loss/{name}"] == pytest.approx(loss, rel=1e-5)


def test_a_resumed_run_has_the_same_sets(train) -> None:
    option, few = sets(train.folder), ("--train.eval_every=0", "--checkpoint.every=2")
    train("--train.steps=2", option, *few)
    err = train.refused("--train.steps=3", *few)
    assert "holds another run: data.validation is None, was {'law': " in err
    (train.folder / "law.txt").write_text("No one." * 50)
    assert "data.validation.law has 351 tokens now, and had 601 when" in train.refused(
        "--train.steps=3", option, *few
    )
