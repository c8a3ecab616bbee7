"""A run that ends early: it saves, says why, and ends at the same step after a kill or a signal."""

import pytest
from runs import DP2_TP2, Killed, kill_after, numbers

from jaxptd.api import Run
from jaxptd.run.folder import RunDir
from jaxptd.train import main

LOSSES = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.25, 10: 1.0, 12: 0.5}
OPTIONS = ("--train.patience=2", "--train.eval_every=2", "--checkpoint.every=5")
END = "ended at step 8: validation_loss has not improved on 2.0000 of step 4 in 2 evaluations"


@pytest.fixture
def evaluations(monkeypatch):
    """Evaluations that get worse after step 4; at other steps they would be the best."""
    monkeypatch.setattr(
        Run,
        "evaluate",
        lambda run: {"validation_loss": LOSSES.get(run.step, 0.0), "perplexity": 1.0},
    )


def test_a_killed_run_ends_at_the_same_step_on_another_layout(train, evaluations, monkeypatch):
    other = RunDir(train.folder / "other")
    out = train(*OPTIONS, f"--train.run_dir={other.path}", "--train.sample_tokens=3").out
    assert END in out and out.count("-" * 72) == 2  # a text is sampled, as at a run's end
    assert [row["step"] for row in other.metrics()] == list(range(1, 9))
    assert (other.checkpoints / "00000008").is_dir()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(7, patch)
        main([*train.options, *OPTIONS])
    assert train.steps == [5]
    assert END in train(*OPTIONS, *DP2_TP2).out
    for row, want in zip(numbers(train.run_dir.metrics()), numbers(other.metrics()), strict=True):
        assert row == pytest.approx(want, rel=1e-5)
    before = train.contents()
    assert "nothing left to do: validation_loss has not improved on" in train(*OPTIONS).out
    assert train.contents() == before
    again = train(*OPTIONS, "--train.patience=3").out
    assert "resuming at step 8" in again and "ended" not in again
    assert train.steps[-1] == 12
