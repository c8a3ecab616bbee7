"""A run that is killed or continued from a checkpoint ends with the same results."""

import json
import shutil
import signal

import pytest
from runs import (
    CONTEXT,
    DP2_TP2,
    EVALUATION,
    PP2,
    STEPS,
    TEXT,
    Killed,
    kill_after,
    killed,
    numbers,
    signal_in,
)
from turns import slow

from jaxptd.api import Run
from jaxptd.commands.command_line import load_config
from jaxptd.run.folder import RunDir
from jaxptd.train import main

# A shorter run with the learning rates, and therefore the programs, of a whole one.
SAME_RATES = f"--optimizer.decay_steps={STEPS}"


@pytest.mark.parametrize("step", [slow(3), 9])
def test_a_killed_run_goes_on_to_the_last_digit(train, whole, step, monkeypatch):
    with monkeypatch.context() as patch:
        kill_after(step, patch)
        with pytest.raises(Killed):
            main(train.options)
    assert [row["step"] for row in train.run_dir.metrics()] == list(range(1, step + 1))
    outcome = train()
    assert ("resuming at step 5" in outcome.out) == (step == 9)
    assert numbers(train.run_dir.metrics()) == whole


def test_a_run_goes_on_with_its_own_data_or_with_what_it_is_told_to(train, tmp_path):
    few = ("--train.eval_every=0", "--checkpoint.every=2", SAME_RATES)
    text = tmp_path / "text.txt"
    train("--train.steps=2", *few)
    text.write_text(TEXT.upper())
    refused = train.refused("--train.steps=3", *few)
    changed = "(the text, tokenizer or chat template has changed)"
    assert f"data.source has other tokens now {changed} than when the" in refused
    assert "accept the new data with checkpoint.data=any" in refused
    text.write_text(TEXT + "and more")
    told = train("--train.steps=3", "--checkpoint.data=any", *few)
    assert f"{len(TEXT) + 9:,} tokens now, and had {len(TEXT) + 1:,} when" in told.out
    text.write_text(TEXT)  # the checkpoint of step 3 saw the longer text
    assert "tokens now, and had" in train.refused("--train.steps=4", *few)


@pytest.mark.slow
def test_a_run_is_made_longer_on_the_same_curve(train):
    """The decay ends at a fixed step, so the originally planned length does not matter."""
    horizon = ("--optimizer.decay=wsd", "--optimizer.decay_steps=8", "--optimizer.cooldown_steps=4")
    few = ("--checkpoint.every=6", "--train.eval_every=0")
    train("--train.steps=6", *horizon, *few)
    train("--train.steps=9", *horizon, *few)
    pieces = numbers(train.run_dir.metrics())
    shutil.rmtree(train.run_dir.path)
    train("--train.steps=9", *horizon, *few)
    assert pieces == numbers(train.run_dir.metrics())
    rates = [row["learning_rate"] for row in pieces]
    assert rates[-1] == pytest.approx(1e-3)  # a tenth of the peak


@pytest.mark.slow
def test_from_the_best_it_goes_on_and_later_ones_are_moved_once_it_begins(train, monkeypatch):
    losses = iter((1.0, 2.0, 3.0))  # for steps 10 and 12, then 12 again
    monkeypatch.setattr(Run, "evaluate", lambda *_: dict.fromkeys(EVALUATION, next(losses)))
    main(train.options)
    assert train.steps == [10, 12]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunDir, "open", killed)
        main([*train.options, "--checkpoint.resume=best"])
    assert train.steps == [10, 12]
    main([*train.options, "--checkpoint.resume=best"])
    assert train.steps == [10, 12]
    assert [row["step"] for row in train.run_dir.metrics()] == [*range(1, STEPS + 1)]
    assert train.run_dir.metrics()[-1]["validation_loss"] == 3.0
    assert (train.run_dir.checkpoints / "00000012.aside").is_dir()


@pytest.mark.slow
def test_onto_another_layout_it_goes_on_to_rounding(train, whole, monkeypatch):
    with monkeypatch.context() as patch:
        kill_after(9, patch)
        with pytest.raises(Killed):
            main([*train.options, "--layout.dp=2"])
    train(*CONTEXT[1:], "--model.remat=full", "--train.micro_batches=4")
    rows = numbers(train.run_dir.metrics())
    assert [row["step"] for row in rows] == [row["step"] for row in whole]
    for row, expected in zip(rows, whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    assert load_config(train.run_dir.path / "config.yaml").layout.tp == 2


def test_whole_records_go_on_to_the_last_digit(train, monkeypatch):
    """The run is killed in the third epoch: 8 of 26 sequences are a step."""
    words = [{"text": line[: 5 + n % 12]} for n, line in enumerate(TEXT.splitlines()[:40])]
    (train.folder / "a.jsonl").write_text("\n".join(map(json.dumps, words)))
    options = [f"--data.source={train.folder / 'a.jsonl'}", "--data.documents=whole", SAME_RATES]
    first = train(*options, f"--train.run_dir={train.folder / 'other'}")
    assert "37 whole records in 26 sequences of 16: 7.93% padding (one record per" in first.out
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(9, patch)
        main([*train.options, *options])
    assert "resuming at step 5" in train(*options).out
    expected = numbers(RunDir(train.folder / "other").metrics())
    assert numbers(train.run_dir.metrics()) == expected
    (train.folder / "a.jsonl").write_text("\n".join(map(json.dumps, words[::-1])))
    assert "data.source has other tokens now" in train.refused(*options, "--train.steps=13")


@pytest.mark.slow
@pytest.mark.parametrize("documents", ["apart", "whole"])
def test_a_mixture_with_prompts_goes_on_with_the_same_curve(train, monkeypatch, documents):
    """Kills the run and resumes it on another layout; one source is read for many epochs."""
    texts = {"many": TEXT.splitlines(), "few": ["the answer is yes"] * 9}
    for name, answers in texts.items():
        records = [{"text": answer, "question": f"{name}? "} for answer in answers]
        (train.folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    source = ", ".join(f"{train.folder}/{name}.jsonl: {1 + len(name)}" for name in texts)
    options = [f"--data.source={{{source}}}", "--data.prompt_field=question"]
    options += [f"--data.documents={documents}", "--data.validation_fraction=0.2"]
    options += ["--model.seq_length=64"]  # the longest record
    other = RunDir(train.folder / "other")
    assert train(*options, f"--train.run_dir={other.path}").code == 0
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(9, patch)
        main([*train.options, *options])
    assert "resuming at step 5" in train(*options, *CONTEXT, "--train.micro_batches=4").out
    rows, expected = numbers(train.run_dir.metrics()), numbers(other.metrics())
    assert len(rows) == len(expected) == STEPS
    assert rows[:5] == expected[:5]
    for row, want in zip(rows, expected, strict=True):
        assert row == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_a_run_that_is_at_its_end_or_beyond_writes_nothing(train):
    train("--train.steps=6", SAME_RATES)
    before = train.contents()
    for steps in (4, 6):
        options = (SAME_RATES, "--train.log_every=3", "--train.sample_tokens=5")
        outcome = train(f"--train.steps={steps}", *options)
        assert (outcome.code, outcome.err) == (0, "")
        assert (
            f"nothing left to do: {train.run_dir.path} is at step 6 of train.steps={steps}; raise "
            "train.steps to train further\n"
        ) in outcome.out
        assert len(outcome.out.split("-" * 72)[1]) > 2  # a sample is still written
        assert train.contents() == before


def goes_on(train, rows, monkeypatch, options):
    """Kills a run with the first options, stops it with the second, completes it with the third."""
    with monkeypatch.context() as patch:
        kill_after(7, patch)
        with pytest.raises(Killed):
            main([*train.options, *options[0]])
    with monkeypatch.context() as patch:
        signal_in("log", signal.SIGTERM, step=9, monkeypatch=patch)
        assert "resuming at step 5" in train(*options[1]).out
    assert "resuming at step 10" in train(*options[2]).out
    found = numbers(train.run_dir.metrics())
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for row, expected in zip(found, rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


DP2 = ("--layout.dp=2",)
PP4 = ("--layout.pp=4", "--train.micro_batches=4")
PARTS = (*PP4, "--layout.schedule=interleaved")


@pytest.mark.slow
def test_onto_another_schedule_it_goes_on_to_rounding(train, whole, monkeypatch):
    parts = (*PARTS, "--layout.stage_layers=[0,0,1,0,0,1,0,0]")  # the second layer comes first
    goes_on(train, whole, monkeypatch, [PP2, parts, DP2])
    finished = train(*parts, "--train.sample_tokens=5")  # saved on the pipeline itself
    assert "resuming at step 12" in finished.out
    assert len(finished.out.split("-" * 72)[1]) > 10


FOLDED = (*PP4, "--layout.schedule=zb-v", "--layout.stage_layers=[1,2,0,1,1,1,1,1]")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [[PP2, PARTS, DP2], [DP2_TP2, FOLDED, PP2], [PARTS, DP2, FOLDED]],
    ids=["to dp", "to 1f1b", "to zb-v"],
)
def test_more_layers_onto_another_schedule(train, layouts, monkeypatch):
    layers = "--model.num_layers=8"
    other = RunDir(train.folder / "whole")
    assert main([*train.options, layers, f"--train.run_dir={other.path}"]) == 0
    options = [(*layout, layers) for layout in layouts]
    goes_on(train, numbers(other.metrics()), monkeypatch, options)


@pytest.mark.slow
def test_documents_are_kept_apart_where_the_sequence_is_cut(train):
    lines = (json.dumps({"text": line}) for line in TEXT.splitlines())
    source = train.folder / "text.jsonl"
    source.write_text("\n".join(lines))
    apart, losses = "--data.documents=apart", []
    for choice in ([], [apart], [apart, "--layout.cp=2"]):
        run = train.folder / f"run{len(losses)}"
        options = [f"--data.source={source}", f"--train.run_dir={run}", "--checkpoint.every=0"]
        assert train(*options, *choice).code == 0
        losses.append([row["loss"] for row in RunDir(run).metrics()])
    joined, one, cut = losses
    assert cut == pytest.approx(one, rel=1e-5)
    assert one[-1] != pytest.approx(joined[-1], rel=1e-4)


@pytest.mark.slow
def test_onto_other_arrangements_it_goes_on_to_rounding(train, monkeypatch):
    """The documents of a batch decide where its samples and tokens are, and nothing is saved."""
    lines = "\n".join(json.dumps({"text": line}) for line in TEXT.splitlines())
    (train.folder / "text.jsonl").write_text(lines)
    apart = (f"--data.source={train.folder / 'text.jsonl'}", "--data.documents=apart")
    whole = RunDir(train.folder / "whole")
    assert main([*train.options, *apart, f"--train.run_dir={whole.path}"]) == 0
    tokens = ("--layout.cp=2", "--layout.ring=gather", "--layout.balance=tokens")
    layouts = [(*DP2, "--layout.balance=samples"), tokens, (*DP2, *tokens)]
    options = [(*apart, *layout) for layout in layouts]
    goes_on(train, numbers(whole.metrics()), monkeypatch, options)


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_to_do(train, whole):
    train()
    before = train.contents()
    assert "resuming at step 12" in train().out
    after = train.contents()
    assert {name for name in after if "tensorboard" not in name} == {
        name for name in before if "tensorboard" not in name
    }
    assert after["metrics.jsonl"] == before["metrics.jsonl"]


@pytest.mark.parametrize(
    "override",
    [
        slow("--model.dropout=0.2"),
        "--data.validation_fraction=0.2",
        slow("--train.seed=3"),
        slow("--optimizer.beta1=0.8"),
    ],
)
def test_another_run_is_refused_and_nothing_changes(train, override):
    train("--train.steps=1", SAME_RATES)
    before = train.contents()
    field = override.removeprefix("--").partition("=")[0]
    assert f"holds another run: {field} is " in train.refused(SAME_RATES, override)
    assert train.contents() == before


@pytest.mark.slow
def test_another_run_is_refused_even_if_its_config_is_lost(train):
    train("--train.steps=1")
    (train.run_dir.path / "config.yaml").unlink()
    before = train.contents()
    assert "another run: train.seed is 3, was 0" in train.refused("--train.seed=3")
    assert "checkpoint.resume is never" in train.refused("--checkpoint.resume=never")
    assert train.contents() == before
    assert "resuming at step 1" in train("--train.steps=2").out


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(train, whole):
    train()
    newest = train.run_dir.checkpoints / "00000012"
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    outcome = train()
    assert (outcome.code, outcome.err) == (0, "")
    assert f"warning: checkpoint {newest} is damaged: " in outcome.out
    assert "resuming at step 10" in outcome.out
    assert numbers(train.run_dir.metrics()) == whole
    assert "resuming at step 12" in train().out  # saved again, now good


# ---- resume by path -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_can_start_from_the_checkpoint_of_another_directory(train, whole):
    train()
    path = train.run_dir.checkpoints / "00000010"
    other = RunDir(train.folder / "other")
    outcome = train(f"--checkpoint.resume={path}", f"--train.run_dir={other.path}")
    assert f"resuming at step 10 from {path}" in outcome.out
    assert numbers(other.metrics()) == whole[10:]


@pytest.mark.slow
def test_resuming_by_path_never_drops_newer_checkpoints(train):
    options = ("--train.steps=2", SAME_RATES, "--checkpoint.every=1")
    train(*options)
    before = train.contents()
    path = train.run_dir.checkpoints / "00000001"
    assert "holds step 2, checkpoint.resume names step 1" in train.refused(
        *options, f"--checkpoint.resume={path}"
    )
    assert train.contents() == before


@pytest.mark.slow
def test_resuming_by_path_is_of_the_same_run_too(train):
    train("--train.steps=1")
    path = train.run_dir.checkpoints / "00000001"
    other = train.folder / "other"
    line = train.refused(
        f"--checkpoint.resume={path}", f"--train.run_dir={other}", "--train.seed=3"
    )
    assert f"{path} belongs to another run: train.seed is 3, was 0" in line
    assert not other.exists()


def test_a_run_that_died_behind_its_last_step_is_completed(train, tmp_path, monkeypatch) -> None:
    """Only memory has the last state; the next start saves it, though no step is left."""
    memory = tmp_path / "memory"
    memory.mkdir()
    words = ["--checkpoint.memory_every=1", f"--checkpoint.memory_dir={memory}"]
    words += ["--checkpoint.every=1000"]

    def die(run: Run, *_: object) -> None:
        run.checkpoints.memory.wait()
        raise Killed

    with monkeypatch.context() as before, pytest.raises(Killed):
        before.setattr(Run, "checkpoint", die)
        main([*train.options, *words])
    assert train.steps == []
    assert any(memory.rglob("*-of-1"))
    assert train(*words).code == 0
    rows = train.run_dir.metrics()
    assert train.steps == [rows[-1]["step"]]
    assert not any(memory.rglob("*-of-1"))
