"""Bad input gives one line and changes no file."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxptd.data import ShuffledWindows, batches
from jaxptd.data.token_files import write_bin


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("--model.num_layer=2", "unknown key model.num_layer; did you mean model.num_layers?"),
        ("--train.steps=many", "train.steps: expected int, got many"),
        ("--layout.zero=4", "layout.zero: expected one of 0, 1, 2, 3, got 4"),
        ("--layout.dp=3", "train.global_batch_size=8 does not split over layout.dp=3"),
        ("--layout.dp=16 --train.global_batch_size=32", "needs 16 devices, this machine has 8"),
        ("--data.source={folder}/none.txt", "none.txt"),
        ("--data.source={folder}/empty.txt", "empty.txt"),
        ("--data.source={folder}/binary.txt", "binary.txt"),
        ("--data.source={folder}/short.txt", "one sequence takes 17"),
        ("--data.tokenizer={folder}/none.json", "no such file; use bytes, or the path"),
        ("--checkpoint.resume={folder}/00000005", "there is no checkpoint"),
        ("--model.family=mixtral --model.moe.replay=true", "data does not name the experts of to"),
        ("--model.family=mixtral --model.moe.upcycle=true", "there are no weights to copy; name a"),
        ("--model.family=mixtral --model.moe.top_k=9", "a token can choose from 8 experts; use 8"),
        ("--model.family=mixtral --model.moe.chunk=nan", "model.moe.chunk: expected float or null"),
        ("--train.run_dir={folder}/text.txt", "text.txt is a file; name a directory"),
        ("--train.run_dir={folder}/text.txt/run", "text.txt is a file; name a directory"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(train, override, line):
    files = {"empty.txt": b"", "binary.txt": b"\x00\xff\xfe", "short.txt": b"short"}
    for file, content in files.items():
        (train.folder / file).write_bytes(content)
    before = sorted([*files, "text.txt"])
    assert line in train.refused(*override.format(folder=train.folder).split())
    assert sorted(path.name for path in train.folder.iterdir()) == before


TABLES = {
    "good": "F0,F1,,B0,,B1\n,F0,B0,F1,B1\n",
    "early": "F0,B0\nF0,B0\n",
    "words": "F0,what\n,F0\n",
}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("--layout.schedule=1f2b", "layout.schedule=1f2b: use one of 1f1b, gpipe, interleaved, "),
        ("--layout.schedule={folder}/none.csv", "none.csv: No such file"),
        ("--layout.schedule={folder}/early.csv", "early.csv: F0 of stage 1, chunk 0, is at tick 0"),
        ("--layout.schedule={folder}/words.csv", "words.csv: stage 0 has a cell 'what'; write F0"),
        (
            "--layout.schedule={folder}/good.csv --train.micro_batches=4",
            "good.csv is a table for train.micro_batches=2, not 4; use",
        ),
        (
            "--layout.schedule={folder}/good.csv --layout.pp=4 --model.num_layers=4",
            "good.csv is a table for layout.pp=2, not 4; use",
        ),
        ("--layout.virtual_stages=2", "layout.schedule=1f1b has virtual_stages=1, not 2; leave"),
        (
            "--layout.virtual_stages=1 --layout.schedule=interleaved",
            "schedule=interleaved with virtual_stages=1: use 2 or more",
        ),
        ("--layout.virtual_stages=0", "layout.virtual_stages=0: use 1 or more"),
        ("--layout.pp=4", "model.num_layers=2 leaves some of the pipeline's 4 parts"),
        ("--layout.schedule=zb-v", "model.num_layers=2 leaves some of the pipeline's 4 parts"),
        ("--layout.stage_layers=[1,2]", "layout.stage_layers=[1, 2]: use 2 numbers, one for each"),
        ("--layout.stage_layers=[1,0,1]", "that add up to model.num_layers=2"),
        ("--layout.stage_layers=[3,-1]", "that add up to model.num_layers=2"),
        ("--layout.pp=16 --model.num_layers=16", "needs 16 devices, this machine has 8"),
        ("--layout.pp=0", "layout.pp=0: an axis has at least one device"),
    ],
)
def test_a_pipeline_that_cannot_be_is_one_line_and_nothing_is_written(train, overrides, line):
    for name, table in TABLES.items():
        (train.folder / f"{name}.csv").write_text(table)
    before = sorted(path.name for path in train.folder.iterdir())
    found = train.refused("--layout.pp=2", *overrides.format(folder=train.folder).split())
    assert line in found
    assert sorted({path.name for path in train.folder.iterdir()} - {"text.txt"}) == before


def test_devices_that_do_not_start_are_one_line(train, monkeypatch):
    def broken():
        raise RuntimeError("Unable to initialize backend:\n no driver")

    monkeypatch.setattr(jax, "devices", broken)
    line = train.refused()
    assert "cannot start its devices: Unable to initialize backend: no driver; use train" in line
    assert not train.run_dir.path.exists()


@pytest.mark.slow
def test_never_resumes_nothing(train):
    train("--train.steps=1")
    before = train.contents()
    assert "checkpoint.resume is never; use another directory" in train.refused(
        "--checkpoint.resume=never"
    )
    assert train.contents() == before


def token_file(folder: Path, *, vocab_size: int) -> tuple[Path, ShuffledWindows]:
    """A nanoGPT file with ids below `vocab_size`, and the sequences that training reads."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, 4000)
    path = folder / "tokens.bin"
    write_bin(path, tokens)
    return path, ShuffledWindows(tokens[:3800], seq_length=16, seed=0, vocab_size=vocab_size)


@pytest.mark.slow
def test_an_id_outside_the_vocabulary_stops_the_run_and_spoils_nothing(train, monkeypatch):
    """Covers an error found only during the run, as in files too large to check before."""
    monkeypatch.setattr(batches, "SCANNED", 0)
    path, windows = token_file(train.folder, vocab_size=257)
    place = int(windows.starts(np.arange(8 * 6, 8 * 7))[3]) + 5  # in a batch of step 7
    tokens = np.fromfile(path, "<u2")
    tokens[place] = 300
    write_bin(path, tokens)
    line = train.refused(f"--data.source={path}")
    assert f"token {place} of {path} has id 300, outside the model's 257 (0 to 256); use" in line
    assert train.steps == [5]
    assert [row["step"] for row in train.run_dir.metrics()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_vocabulary_without_the_prompt_only_costs_the_sample(train):
    path, _ = token_file(train.folder, vocab_size=64)
    vocabulary = ("--model.vocab_size=64", f"--data.source={path}", "--train.sample_tokens=5")
    outcome = train(*vocabulary, "--train.steps=2", "--data.validation_fraction=0")
    assert (outcome.code, outcome.err) == (0, "")
    assert "no sample: the prompt '' has id 256, but the model knows only 0 to 63" in outcome.out
