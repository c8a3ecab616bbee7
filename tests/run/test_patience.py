"""Early stopping as a function of the logged evaluations."""

from pathlib import Path

import pytest

from jaxptd import UserError
from jaxptd.commands.command_line import load_config
from jaxptd.run.checkpoints import require_metric
from jaxptd.run.patience import Patience

CONFIG = Path(__file__).parents[2] / "configs" / "test-tiny.yaml"


def patience_of(*overrides: str) -> Patience:
    return Patience(load_config(CONFIG, ["--train.eval_every=10", *overrides]))


def end_of(patience: Patience, values: list, metric: str = "validation_loss") -> int | None:
    """The step at which a run with these evaluations, ten steps apart, ends; None if it goes on."""
    for number, value in enumerate(values, start=1):
        patience.add({"step": 10 * number, metric: value})
        if patience.is_over():
            return 10 * number
    return None


@pytest.mark.parametrize(
    ("options", "values", "end"),
    [
        (["--train.patience=2"], [3.0, 2.0, 2.0, 2.1], 40),
        (["--train.patience=2"], [3.0, 3.1, 2.9, 3.0, 2.95], 50),
        (["--train.patience=2"], [3.0, 3.1, 2.9, 3.0, 2.8], None),
        (["--train.patience=1"], [3.0, 3.0], 20),
        (["--train.patience=3"], [3.0, 3.0, 3.0], None),
        (["--train.patience=2", "--train.min_improvement=0.5"], [3.0, 2.75, 2.5], 30),
        (["--train.patience=2", "--train.min_improvement=0.5"], [3.0, 2.75, 2.25], None),
        ([], [1.0] * 9, None),
    ],
)
def test_it_ends_after_evaluations_that_are_no_better(options, values, end) -> None:
    assert end_of(patience_of(*options), values) == end


def test_a_score_gets_better_as_it_rises() -> None:
    options = ("--train.patience=2", "--checkpoint.best_metric=validation_accuracy")
    patience = patience_of(*options)
    assert end_of(patience, [0.2, 0.5, 0.4, 0.5], "validation_accuracy") == 40
    words = "validation_accuracy has not improved on 0.5000 of step 20 in 2 evaluations"
    assert patience.reason() == f"{words} (train.patience=2)"


def test_only_evaluations_that_are_due_count() -> None:
    """A signal also evaluates, at any step; a run that was not stopped there has no such row."""
    patience = patience_of("--train.patience=1")
    rows = [{"step": 10, "validation_loss": 2.0}, {"step": 13, "validation_loss": 2.5}]
    for row in [*rows, {"step": 20, "loss": 3.0}]:
        patience.add(row)
    assert not patience.is_over()
    patience.add({"step": 20, "validation_loss": 2.0})
    assert patience.is_over()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--train.patience=1", "--train.eval_every=0"],
            "train.patience=1 counts evaluations, and",
        ),
        (["--train.min_improvement=0.1"], "train.min_improvement=0.1 has no effect without"),
        (["--train.patience=-1"], "train.patience=-1 must be a number, 0 or more"),
        (
            ["--train.patience=1", "--data.validation_fraction=0"],
            "train.patience=1 with checkpoint.best_metric=validation_loss: no evaluation measures",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused(options, words) -> None:
    with pytest.raises(UserError) as found:
        require_metric(load_config(CONFIG, options))
    assert str(found.value).startswith(words)
