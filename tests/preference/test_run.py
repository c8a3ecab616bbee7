"""A run on pairs: its reference is that of the weights that it began with, also once resumed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Killed, Trainer, kill_after, numbers

import jaxptd
from jaxptd.analysis.compiled_step import random_batch
from jaxptd.errors import UserError
from jaxptd.run import reference
from jaxptd.run.saved import restore_weights
from jaxptd.step import Program
from jaxptd.train import main

FIELDS = {
    "data.prompt_field": "prompt",
    "data.text_field": "good",
    "data.rejected_field": "bad",
    "data.documents": "whole",
    "data.validation_fraction": 0.25,
    "model.preference.loss": "sigmoid",
    "model.seq_length": 64,
    "model.hidden_size": 16,
    "model.dropout": 0,
    "optimizer.learning_rate": 0.01,
    "optimizer.warmup_steps": 1,
    "train.global_batch_size": 4,
    "train.eval_every": 5,
    "train.log_every": 1,
}
TRAIN = [f"--{name}={value}" for name, value in FIELDS.items()]


@pytest.fixture
def pairs(tmp_path: Path, capfd: pytest.CaptureFixture) -> Trainer:
    draw, words = np.random.default_rng(0), [["red", "ice"], ["sun", "air"]]
    with (tmp_path / "text.txt").open("w") as file:  # JSON lines, under the name of all runs' data
        for _ in range(60):
            sizes = zip((0, 0, 1), draw.integers(1, 4, 3), strict=True)
            texts = [" ".join(draw.choice(words[kind], size)) for kind, size in sizes]
            file.write(json.dumps(dict(zip(("prompt", "good", "bad"), texts, strict=True))) + "\n")
    (tmp_path / "text.txt").rename(tmp_path / "pairs.jsonl")
    return Trainer(tmp_path, capfd)


def begun(trainer: Trainer, *more: str) -> list[str]:
    source = f"--data.source={trainer.folder}/pairs.jsonl"
    return [*trainer.options, *TRAIN, source, *more]


def heard(trainer: Trainer) -> str:
    return trainer.capture.readouterr().out


def scores(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / reference.NAME, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def test_a_killed_run_compares_with_the_same_model(
    pairs: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = pairs.folder / "whole", pairs.run_dir.path
    assert main(begun(pairs, f"--train.run_dir={whole}", "--layout.cp=2")) == 0
    assert "warning: model.preference compares with a model of random weights" in heard(pairs)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(7, patch)
        main(begun(pairs, "--layout.dp=2", "--layout.tp=2"))
    first = scores(folder)
    assert first.keys() == {"train", "validation/"}
    assert sum(len(x) for x in first.values()) == 60
    assert main(begun(pairs, "--layout.cp=2")) == 0
    for name, values in scores(folder).items():
        np.testing.assert_array_equal(values, first[name])
        np.testing.assert_allclose(values, scores(whole)[name], rtol=1e-5)
    rows, expected = (numbers(jaxptd.load(each).run_dir.metrics()) for each in (folder, whole))
    names = ["validation_loss", "validation_preference_loss", "validation_accuracy"]
    assert [x for x in rows[-1] if "validation" in x][:3] == names
    assert "perplexity" not in rows[-1]
    assert rows[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)  # no answer has gained yet
    for row, want in zip(rows, expected, strict=True):
        assert row == pytest.approx(want, rel=1e-4, abs=1e-5)
    run = jaxptd.load(folder)
    found = run.evaluate()
    assert found == pytest.approx({name: rows[-1][name] for name in found}, rel=1e-5)
    windows = run.data.validation
    number = windows.windows_per_epoch
    assert number % 4
    batches = [run.read(windows, i, beyond=number) for i in range(0, number, 4)]
    assert sum(int((batch["pairs"] >= 0).sum()) for batch in batches) == len(windows.ends)


def damaged(folder: Path, damage: Any) -> str:
    path = folder / reference.NAME
    damage(path)
    with pytest.raises(UserError) as error:
        jaxptd.load(folder).evaluate()
    return str(error.value)


def test_a_reference_that_is_missing_or_damaged_is_refused(pairs: Trainer) -> None:
    assert main(begun(pairs, "--train.steps=2")) == 0
    folder = pairs.run_dir.path
    path = folder / reference.NAME
    kept, before = path.read_bytes(), pairs.contents()
    other = {name: values[:-1] for name, values in scores(folder).items()}
    for damage, message in (
        (lambda path: path.write_bytes(kept[:100]), "cannot be read"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: np.savez(path, train=np.zeros((1, 2))), "is of other pairs"),
        (lambda path: np.savez(path, **other), "is of other pairs"),
        (Path.unlink, "are not known; jaxptd.train computes them"),
    ):
        assert message in damaged(folder, damage)
    error = pairs.refused(*begun(pairs, "--train.steps=4")[len(pairs.options) :])
    assert "reference.npz is missing: it has the log-probabilities of the model" in error
    path.write_bytes(kept)
    assert pairs.contents() == before


def test_a_run_on_pairs_and_one_without_begin_from_each_other(pairs: Trainer) -> None:
    assert main(begun(pairs, "--train.steps=2")) == 0
    run = jaxptd.load(pairs.run_dir.path)
    model = dataclasses.replace(run.config.model, preference=None)
    config = dataclasses.replace(run.config, model=model, data=jaxptd.DataConfig())
    params = restore_weights(Program(config, run.program.mesh), pairs.run_dir.path)
    for name, x in run.state["params"].items():
        np.testing.assert_array_equal(params[name], x)
    batch = random_batch(run.config)
    with pytest.raises(UserError, match="a batch has no valid target in pairs for the loss"):
        run.loss_and_gradients(batch | {"targets": 0 * batch["targets"] - 1})


def test_pairs_and_their_loss_need_each_other(pairs: Trainer) -> None:
    given = begun(pairs)[len(pairs.options) :]
    plain = [each for each in given if "preference" not in each]
    assert "data.rejected_field=bad is read for pairs" in pairs.refused(*plain)
    unnamed = [each for each in given if "rejected" not in each]
    assert "needs pairs of answers; name the field" in pairs.refused(*unnamed)
    joined = [each for each in given if "documents" not in each]
    assert "compares whole answers; use data.documents=whole" in pairs.refused(*joined)
    for field in ("mtp.layers=1", "z_loss=0.1"):
        assert f"with model.{field}" in pairs.refused(*given, f"--model.{field}")
    assert not pairs.run_dir.path.exists()
