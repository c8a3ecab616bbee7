"""Generates text from a run's checkpoints on the command line."""

import functools
import json
import shutil
import sys
from pathlib import Path

import jax
import pytest
import tiny

from jaxptd import generate, train
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.errors import run_command
from jaxptd.layout import Layout
from jaxptd.run import saved

CONFIG = Path(__file__).parents[2] / "configs" / "test-tiny.yaml"
TEXT = "".join(f"def function_{n}(a, b): return a + b * {n}\n" for n in range(400))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Directory of a run of 12 steps with checkpoints at 10 and 12."""
    assert len(jax.devices()) == 8  # starts JAX before a command does, with fewer
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text(TEXT)
    options = ["--train.steps=12", "--train.sample_tokens=0", "--train.eval_every=0"]
    options += ["--train.micro_batches=1"]
    places = [f"--data.source={folder / 'text.txt'}", f"--train.run_dir={folder / 'run'}"]
    assert train.main(["--config", str(CONFIG), *options, *places]) == 0
    return folder / "run"


def command(*options: object) -> int:
    argv = [str(option) for option in options]
    with pytest.raises(SystemExit) as end:
        run_command(functools.partial(generate.main, argv))
    return end.value.code


@pytest.fixture
def ask(run_dir, capfd):
    def run(*options: object, expect: int = 0) -> tuple[str, str]:
        capfd.readouterr()
        assert command("--run-dir", run_dir, *options) == expect
        return capfd.readouterr()

    return run


@pytest.mark.parametrize("layout", [Layout(), Layout(row=2, col=2)], ids=str)
def test_a_model_generates_where_its_kernels_and_8_bits_are_not(layout):
    fields = {"attention": "cudnn", "kernels": "triton", "products": "fp8", "dtype": "bfloat16"}
    config = tiny.config(Layout(), **fields)
    found = saved.program_to_generate(config, layout=layout, platform="cpu").resolved.model
    assert (found.attention, found.kernels, found.products) == ("xla", "xla", "native")


def test_the_command_writes_the_prompt_and_so_many_bytes(ask):
    out, err = ask("--prompt", "def ", "--tokens", 10, "--temperature", 0)
    assert err == ""
    assert out.startswith("def ")
    assert len(out) == len("def ") + 10 + 1  # plus a line feed; the model knows only ASCII


def test_the_text_as_json_or_without_the_prompt_from_the_config_of_a_run(ask, run_dir, capfd):
    options = ("--prompt", "def ", "--tokens", 10, "--temperature", 0)
    text = ask(*options)[0].removesuffix("\n")
    assert json.loads(ask(*options, "--json")[0]) == {"prompt": "def ", "text": text}
    assert command("--config", run_dir / "config.yaml", *options, "--quiet") == 0
    assert capfd.readouterr() == (text.removeprefix("def ") + "\n", "")


def test_the_text_ends_at_an_end_of_the_tokenizer_and_at_a_stop(ask, monkeypatch):
    options = ("--prompt", "def ", "--tokens", 10, "--temperature", 0)
    text = ask(*options)[0].removesuffix("\n")
    added = text.removeprefix("def ")
    stop = added[3:5]
    assert ask(*options, "--stop", "none of it", "--stop", stop)[0] == (
        "def " + added[: added.index(stop)] + "\n"
    )
    monkeypatch.setattr(ByteTokenizer, "ends", (256, ord(added[3])))
    assert ask(*options)[0] == "def " + added[: added.index(added[3])] + "\n"


def test_a_terminal_shows_the_text_of_a_pipe_as_it_is_written(ask, monkeypatch):
    options = ("--prompt", "def ", "--tokens", 20, "--temperature", 0)
    stop = ask(*options)[0][9:11]
    ways = [(), ("--quiet",), ("--stop", stop)]
    piped = [ask(*options, *way) for way in ways]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    calls = []

    def show(*words, **how):
        calls.append(how)
        print(*words, **how)

    monkeypatch.setattr(generate, "print", show, raising=False)
    assert [ask(*options, *way) for way in ways] == piped
    assert sum(how.get("flush", False) for how in calls) > 2 * len(ways)


@pytest.mark.slow
def test_the_command_writes_the_same_on_two_devices(ask):
    options = ("--prompt", "def f", "--tokens", 40, "--temperature", 0)
    assert ask(*options, "--tp", 2) == ask(*options)


@pytest.mark.slow
def test_the_command_is_a_function_of_its_seed(ask):
    options = ("--tokens", 10, "--temperature", 1.5, "--seed")
    texts = [ask(*options, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--temperature", -1], "temperature=-1.0 must be a number, 0 or more"),
        (
            ["--temperature", "hot"],
            "argument --temperature: invalid float value: 'hot'; see --help",
        ),
        (["--top-k", -3], "top_k=-3 must be 0 (all tokens) or more"),
        (["--tokens", 0], "--tokens 0: use 1 to"),
        (["--seed", 2**32], "seed=4294967296 must be 0 or more, and below 2**32"),
        (["--tp", 0], "layout.tp=0: an axis has at least one device"),
        (["--token", 3], "unrecognized arguments: --token 3"),
    ],
)
def test_bad_options_are_one_line(ask, options, line):
    out, err = ask(*options, expect=2)
    assert out == ""
    assert err.startswith("error: ")
    assert line in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["none", "empty"])
def test_without_a_checkpoint_it_says_how_to_get_one(tmp_path, capfd, name):
    (tmp_path / "empty").mkdir()
    assert command("--run-dir", tmp_path / name) == 2
    err = capfd.readouterr().err
    assert f"{name} holds no checkpoint; train with --train.run_dir" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("file", ["manifest.json", "arrays/commit_success.txt"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run_dir, tmp_path, capfd, file):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    (copy / "checkpoints" / "00000012" / file).write_bytes(b"?")
    assert command("--run-dir", copy, "--tokens", 5) == 0
    out, err = capfd.readouterr()
    assert err.startswith(f"warning: checkpoint {copy / 'checkpoints' / '00000012'} is damaged: ")
    assert "warning" not in out
    (copy / "checkpoints" / "00000010" / file).write_bytes(b"?")
    assert command("--run-dir", copy, "--tokens", 5) == 2
    assert "can be read: all are damaged" in capfd.readouterr().err


def test_a_file_of_prompts_gives_a_json_line_for_each(ask, tmp_path):
    """Each text is that of its prompt alone; prompts of similar lengths share a program."""
    prompts = ["def f", "", "return a + ", "x" * 70]
    (tmp_path / "p.txt").write_text("\n".join(prompts) + "\n")
    lines = [json.dumps({"prompt": each, "id": 3}) for each in prompts]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    options = ("--tokens", 5, "--seed", 3, "--top-p", 0.9)
    out, _ = ask("--prompts", tmp_path / "p.txt", *options)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    for row in rows:
        alone = json.loads(ask("--prompt", row["prompt"], *options, "--json")[0])
        assert row == alone
    assert ask("--prompts", tmp_path / "p.jsonl", *options)[0] == out


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none.txt", None, "No such file"),
        ("p.txt", b"", "it is empty"),
        ("p.txt", b"\xff\xfe", "it is not UTF-8"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": 3}', 'line 2: use an object such as {"prompt"'),
        ("p.jsonl", b"[1", "line 1: use an object"),
        ("p.jsonl", b"[" * 100000, "line 1: use an object"),
    ],
)
def test_a_bad_file_of_prompts_is_one_line(ask, tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_bytes(text)
    _, err = ask("--prompts", tmp_path / name, expect=2)
    assert words in err
    assert len(err.splitlines()) == 1


def test_prompts_and_a_prompt_are_refused(ask, tmp_path):
    (tmp_path / "p.txt").write_text("a")
    _, err = ask("--prompts", tmp_path / "p.txt", "--prompt", "a", expect=2)
    assert "--prompt and --prompts are both given; use one" in err
