"""`jaxptd convert`: GPT-2 to a run and back, bit for bit; shards; the files of a directory."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from command_lines import refused
from hugging import gpt2_tensors, write_directory

from jaxptd.errors import UserError
from jaxptd.hf.convert import main
from jaxptd.hf.directory import Directory
from jaxptd.hf.read import sizes_of


def contents(folder: Path) -> dict[str, np.ndarray]:
    directory = Directory(folder)
    whole = {name: (slice(None),) * len(shape) for name, shape in directory.shapes.items()}
    return {name: directory.tensor(name)[each] for name, each in whole.items()}


@pytest.fixture(scope="module")
def run_dir(gpt2: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    main(["--from-hf", str(gpt2), "--out", str(out), "--quiet"])
    return out


def test_there_and_back_keeps_every_bit(gpt2, run_dir, tensors, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    main(["--to-hf", str(run_dir), "--out", str(out)])
    assert capsys.readouterr().out == f"{out}: step 0, tensors 64, bytes 39168, files 1\n"
    found = contents(out)
    assert set(found) == set(tensors)
    for name, x in tensors.items():
        assert found[name].tobytes() == x.tobytes(), name
    assert sizes_of(Directory(out)) == sizes_of(Directory(gpt2))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["torch_dtype"]) == (["GPT2LMHeadModel"], "float32")
    assert "n_inner" not in config  # as in the base


def test_the_folder_of_a_tokenizer_is_kept(gpt2, tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(gpt2, folder)
    words = tokenizers.models.WordLevel({"?": 0, "a": 1, "</s>": 2}, unk_token="?")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 7}')
    (folder / "notes.txt").write_text("no file of a tokenizer")
    run, out = tmp_path / "run", tmp_path / "out"
    main(["--from-hf", str(folder), "--out", str(run), "--quiet"])
    main(["--to-hf", str(run), "--out", str(out), "--quiet"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert not (out / "notes.txt").exists()


def test_one_of_several_processes_is_refused(gpt2, tmp_path, monkeypatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "a", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="convert runs in one process; start it without srun"):
        main(["--from-hf", str(gpt2), "--out", str(tmp_path / "run")])
    assert list(tmp_path.iterdir()) == []


def test_shards_in_another_precision(run_dir, tensors, tmp_path) -> None:
    out = tmp_path / "out"
    sizes = ("--dtype=bfloat16", "--shard-size=5KB")
    main(["--to-hf", str(run_dir), "--out", str(out), *sizes, "--quiet"])
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3
    assert max(path.stat().st_size for path in files) < 5000 + 2000  # plus their headers
    for name, x in contents(out).items():
        np.testing.assert_array_equal(x, tensors[name].astype(ml_dtypes.bfloat16))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(x.size for x in tensors.values())


def test_check_reads_headers(gpt2, capsys, tmp_path) -> None:
    main(["--check", str(gpt2)])
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "9792 parameters, 39.2 kB in F32; ignored: nothing"
    assert all(row.startswith("transformer.") for row in rows[:16])
    assert rows[16].startswith("weights: readable")
    masked = gpt2_tensors() | {"transformer.h.0.attn.bias": np.ones((1, 1, 16, 16), np.float32)}
    folder = write_directory(tmp_path / "masked", masked)
    main(["--check", str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["ignored"] == ["transformer.h.0.attn.bias"]
    assert (found["parameters"], found["bytes"]) == (9792, 9792 * 4)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "give one of --from-hf DIR, --to-hf RUN_DIR or --check DIR"),
        (["--check", "DIR", "--to-hf", "DIR"], "give one of --from-hf DIR"),
        (
            ["--check", "DIR", "--out", "x"],
            "--out is required with --from-hf and --to-hf, and not ",
        ),
        (["--from-hf", "DIR"], "--out is required with --from-hf and --to-hf"),
        (
            ["--from-hf", "DIR", "--out", "x", "--dtype", "float32"],
            "--dtype, --shard-size, --unmerged and --ema need ",
        ),
        (["--from-hf", "DIR", "--out", "DIR"], "exists; choose another name, or remove it"),
        (["--from-hf", "nowhere", "--out", "x"], "nowhere has no config.json; name a directory"),
        (["--to-hf", "nowhere", "--out", "x"], "nowhere holds no checkpoint"),
        (["--to-hf", "RUN", "--out", "DIR"], "exists; choose another name, or remove it"),
        (["--to-hf", "RUN", "--out", "/proc/x"], "--out /proc/x: "),
        (
            ["--to-hf", "RUN", "--out", "x", "--shard-size", "0GB"],
            "0GB is not a size; use one such as",
        ),
        (
            ["--to-hf", "RUN", "--out", "x", "--shard-size", "5TB"],
            "5TB is not a size; use one such as",
        ),
        (["--to-hf", "RUN", "--out", "x", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
    ids=lambda x: "" if isinstance(x, str) else " ".join(x),
)
def test_refused(gpt2, run_dir, tmp_path, monkeypatch, capsys, options, line) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {"DIR": str(gpt2), "RUN": str(run_dir)}
    assert line in refused(capsys, main, [paths.get(each, each) for each in options])
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_nothing(run_dir, tmp_path, monkeypatch, capsys) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    line = refused(capsys, main, ["--to-hf", str(run_dir), "--out", str(tmp_path / "out")])
    assert "No space left on device; use a writable directory" in line
    assert list(tmp_path.iterdir()) == []
