"""`--from DIR`, `--model.from DIR` and their keys in a file: a directory written out as fields."""

import json
from pathlib import Path

import pytest
from command_lines import refused
from hugging import gpt2_tensors, swin, write_directory
from hugging.tokenizer import WORDS, write_tokenizer

import jaxptd
from jaxptd.commands.command_line import as_yaml
from jaxptd.commands.run_options import read_run, run_parser
from jaxptd.comms import main as comms
from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.hf.directory import Directory
from jaxptd.hf.read import sizes_of
from jaxptd.memory import main as memory
from jaxptd.train import main as train


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Home directory: ~/m holds a text model, ~/n one without a tokenizer, ~/i an image model."""
    folder = tmp_path_factory.mktemp("home")
    write_tokenizer(write_directory(folder / "m", gpt2_tensors()), WORDS)
    write_directory(folder / "n", gpt2_tensors())
    write_directory(folder / "i", swin.swin_tensors(), base=swin.CONFIG)
    return folder


@pytest.fixture(autouse=True)
def at_home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)


def read(*argv: str, new: bool = True) -> Config:
    return read_run(run_parser("prog", "what it does", examples=()), argv, new=new)[0]


def chosen(config: Config) -> tuple[int, str | None, str]:
    return config.model.num_layers, config.checkpoint.start, config.data.tokenizer


@pytest.mark.parametrize("argv", [["--from=~/m"], ["--from", "~/m"], ["--config", "from.yaml"]])
def test_sizes_weights_and_tokenizer(home: Path, argv: list[str]) -> None:
    Path("from.yaml").write_text("from: ~/m")
    path = str(home / "m")
    for new in (True, False):
        assert chosen(read(*argv, new=new)) == (5, path, path)
    config = read(
        *argv, "--data.tokenizer=bytes", "--checkpoint.start=random", "--model.dropout=0.1"
    )
    assert chosen(config) == (5, "random", "bytes")
    assert config.model.dropout == 0.1
    options = argv if argv[0] != "--config" else []
    assert (
        jaxptd.load_config("from.yaml" if not options else "quickstart", options).model.seq_length
        == 16
    )
    text = as_yaml(read(*argv))
    assert "from" not in text
    Path("config.yaml").write_text(text)
    assert read("--run-dir", ".") == read(*argv, "--train.run_dir=.")


def test_it_overrides_a_file_and_options_override_it(home: Path) -> None:
    Path("config.yaml").write_text("model: {num_layers: 3, dropout: 0.1}\ndata: {tokenizer: bytes}")
    config = read("--config=config.yaml", "--from=~/m")
    assert chosen(config) == (5, str(home / "m"), str(home / "m"))
    assert config.model.dropout == 0.1
    config = read(
        "--config=config.yaml", "--from=~/m", "--data.tokenizer=x", "--model.seq_length=8"
    )
    assert (config.data.tokenizer, config.model.seq_length) == ("x", 8)
    Path("config.yaml").write_text("from: ~/m\nmodel: {seq_length: 4}\ndata:\n  tokenizer: bytes")
    config = read("--config=config.yaml")
    assert chosen(config) == (5, str(home / "m"), "bytes")
    assert config.model.seq_length == 4
    assert chosen(read("--config=config.yaml", "--from=~/n"))[1] == str(home / "n")


@pytest.mark.parametrize("name", ["null", "random", "123", "1e3", "a: b", "[x]", "true", "a b#c"])
def test_names_that_mean_something_in_yaml(name: str) -> None:
    write_tokenizer(write_directory(Path(name), gpt2_tensors()), WORDS)
    start = f"./{name}" if name in ("null", "random") else name
    config = read(f"--from={name}")
    assert chosen(config) == (5, start, name)
    Path("config.yaml").write_text(as_yaml(config))
    assert read("--config=config.yaml") == config
    Path("config.yaml").write_text(f"from: '{name}'")
    assert chosen(read("--config=config.yaml")) == (5, start, name)


def test_a_model_of_images_has_no_tokenizer(home: Path) -> None:
    config = read("--from=~/i")
    assert (config.data.tokenizer, config.checkpoint.start) == ("bytes", str(home / "i"))


def test_sizes_alone(home: Path) -> None:
    Path("config.yaml").write_text("model: {from: ~/m}")
    for argv in (["--model.from=~/m"], ["--config=config.yaml"]):
        assert chosen(read(*argv, new=False)) == (5, None, "bytes")
        assert read(*argv, "--model.num_layers=2", new=False).model.num_layers == 2
        meant = ("--data.tokenizer=bytes", "--checkpoint.start=random")
        assert chosen(read(*argv, *meant)) == (5, "random", "bytes")
    expected = sizes_of(Directory(home / "m"))
    model = read("--model.from=~/m", new=False).model
    assert {name: getattr(model, name) for name in expected} == expected


def test_a_config_of_sizes_alone_warns_in_python_of_what_nobody_chose(home: Path) -> None:
    Path("config.yaml").write_text("model: {from: ~/m}")
    line = f"--model.from {home}/m gives only sizes, and no weights are chosen"
    with pytest.warns(UserWarning, match=line) as caught:
        config = jaxptd.load_config("config.yaml")
    assert (caught[0].filename, chosen(config)) == (__file__, (5, None, "bytes"))
    with pytest.warns(UserWarning, match="data.tokenizer=bytes although"):
        jaxptd.load_config("config.yaml", ["--checkpoint.start=random"])
    meant = ["--checkpoint.start=random", "--data.tokenizer=bytes"]
    jaxptd.load_config("config.yaml", meant)  # warnings are errors in these tests


WEIGHTS = "--model.from HOME/m gives only sizes, and no weights are chosen; use --from HOME/m for"
BYTES = "data.tokenizer=bytes although HOME/m has a tokenizer.json; use --data.tokenizer HOME/m"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--model.from=~/m"], WEIGHTS),
        (["--config=sizes.yaml"], WEIGHTS),
        (["--config=sizes.yaml", "--checkpoint.start=null"], WEIGHTS),
        (["--model.from=~/m", "--checkpoint.start=random"], BYTES),
        (["--model.from=~/m", "--checkpoint.start=~/m"], BYTES),
        (["--from=~/m", "--model.from=~/m"], "--from and --model.from both name a model"),
        (["--config=both.yaml"], "both.yaml: from and model.from both name a model"),
        (["--from=~/m", "--model.num_layers=3"], "model.num_layers=3, but HOME/m has 5; use"),
        (["--config=other.yaml"], "model.num_layers=3, but HOME/m has 5; use"),
        (["--from=~/n"], "data.tokenizer='HOME/n': it is a folder without tokenizer.json"),
        (["--from=nowhere"], "nowhere has no config.json; name a directory of a Hugging Face"),
        (["--from="], "--from"),
        (["--from"], "--from"),
        (["--config=bucket.yaml"], "bucket.yaml: from: quux://b/m: no store has URLs with quux://"),
        (["--config=null.yaml"], "null.yaml: from: expected a directory of a Hugging Face model"),
        (["--config=list.yaml"], "list.yaml: from: expected a directory of a Hugging Face model"),
        (["--from=run"], "run is the directory of a run; use --run-dir run to continue it, "),
        (["--from=~nobody-here/x"], "~nobody-here"),
    ],
)
def test_refused_before_anything_is_written(home: Path, capsys, argv, line) -> None:
    files = {
        "sizes": "model: {from: ~/m}",
        "both": "from: ~/m\nmodel: {from: ~/m}",
        "other": "from: ~/m\nmodel: {num_layers: 3}",
        "null": "from:",
        "list": "from: [a]",
        "bucket": "from: quux://b/m",
        "run/config": "train: {steps: 3}",
    }
    Path("run").mkdir()
    for name, text in files.items():
        Path(f"{name}.yaml").write_text(text)
    options = [*argv, "--train.run_dir=out", "--train.platform=cpu", "--layout.tp=1"]
    error = refused(capsys, train, options)
    assert line in error.replace(str(home), "HOME")
    assert not Path("out").exists()


def test_a_run_directory_may_be_new(home: Path) -> None:
    config = read("--from=~/m", "--run-dir=~/new")
    assert (config.train.run_dir, config.model.num_layers) == (str(home / "new"), 5)
    with pytest.raises(UserError, match="--from and --run-dir both name a model; give one"):
        read("--from=~/m", "--run-dir=x", new=False)


def test_commands_that_read_no_data_need_no_tokenizer(capsys) -> None:
    assert memory(["--from=~/n", "--compiled=false", "--json"]) in (None, 0)
    assert json.loads(capsys.readouterr().out)["rows"][0]["formula"] == 9792 * 4


def test_a_lone_config_is_enough_for_sizes(home: Path, capsys: pytest.CaptureFixture) -> None:
    Path("lone").mkdir()
    Path("lone/config.json").write_text((home / "m" / "config.json").read_text())
    for option in ("--from=lone", "--model.from=lone"):
        assert memory([option, "--compiled=false", "--json"]) in (None, 0)
        assert json.loads(capsys.readouterr().out)["rows"][0]["formula"] == 9792 * 4
        assert comms([option, "--layout.dp=2", "--quiet"]) == 0
        assert read(option, new=False).model == read("--from=~/m", new=False).model
        capsys.readouterr()
    Path("c.yaml").write_text("from: lone\nmodel: {seq_length: 8}")
    assert read("--config=c.yaml", new=False).model.num_layers == 5
    line = "lone has neither model.safetensors nor model.safetensors.index.json; download the dir"
    for argv in (["--from=lone"], ["--config=c.yaml"]):
        assert line in refused(capsys, train, [*argv, "--train.run_dir=out"])
    assert not Path("out").exists()
    with pytest.raises(UserError, match="lone has neither model.safetensors"):
        jaxptd.from_hf("lone")
    read("--from=lone", "--checkpoint.start=random")
    Path("text.txt").write_text("a text of some words. " * 40)
    data = ["--data.source=text.txt", "--train.run_dir=out", "--train.platform=cpu"]
    steps = ["--train.steps=1", "--train.sample_tokens=0", "--checkpoint.every=0"]
    meant = ["--checkpoint.start=random", "--model.vocab_size=257"]
    assert train(["--model.from=lone", *meant, *data, *steps, "--quiet"]) == 0


def test_home_is_written_out_in_every_path(home: Path) -> None:
    fields = {
        "data.source": "[~/a.txt, ~/b/*.txt]",
        "data.tokenizer": "~/t.json",
        "checkpoint.resume": "~/r",
        "train.run_dir": "~/out",
        "layout.pp": "2",
        "layout.schedule": "~/s.csv",
    }
    config = read(*(f"--{name}={value}" for name, value in fields.items()))
    assert config.data.source == [f"{home}/a.txt", f"{home}/b/*.txt"]
    assert config.data.tokenizer == f"{home}/t.json"
    assert config.checkpoint.resume == f"{home}/r"
    assert config.train.run_dir == f"{home}/out"
    assert config.layout.schedule == f"{home}/s.csv"
    config = read("--data.source={~/a.txt: 2, ~/b.txt: 1}", "--checkpoint.start=~/m")
    assert config.data.source == {f"{home}/a.txt": 2, f"{home}/b.txt": 1}
    assert config.checkpoint.start == f"{home}/m"
