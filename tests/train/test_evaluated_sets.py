"""A run with sets to evaluate on: their losses, on every layout, and after a kill."""

import numpy as np
import pytest
from runs import CONTEXT, DP2_TP2, Killed, kill_after, numbers

import jaxptd
from jaxptd.api import Run
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


@pytest.mark.slow
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


def test_the_best_by_a_set_is_kept_and_resumed_from(train, monkeypatch) -> None:
    """The held-out loss falls, the set's rises: the first checkpoint is the set's best."""
    losses = {"validation_loss": [3.0, 2.0, 1.0, 0.5], "validation_loss/law": [1.0, 2.0, 3.0, 4.0]}
    rows = iter(
        [dict(zip(losses, each, strict=True)) for each in zip(*losses.values(), strict=True)]
    )
    monkeypatch.setattr(Run, "evaluate", lambda *_: next(rows))
    options = [*train.options, sets(train.folder), "--train.steps=6", "--train.eval_every=2"]
    options += ["--checkpoint.every=2", "--checkpoint.keep=1"]
    options += ["--checkpoint.best_metric=validation_loss/law"]
    main(options)
    assert train.steps == [2, 6]
    main([*options, "--checkpoint.resume=best", "--train.steps=4"])
    assert [row["step"] for row in train.run_dir.metrics()] == [1, 2, 3, 4]
    assert (train.run_dir.checkpoints / "00000006.aside").is_dir()


def test_a_metric_that_is_not_measured_is_refused_before_anything_is_written(train) -> None:
    err = train.refused("--checkpoint.best_metric=validation_loss/law")
    assert "checkpoint.best_metric=validation_loss/law: no evaluation measures it" in err
    assert not train.run_dir.path.exists()
