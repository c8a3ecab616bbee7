"""Runs that start from the weights of a Hugging Face directory, a checkpoint or another run."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from hugging import gpt2_tensors, write_directory
from runs import TEXT

import jaxptd
from jaxptd import CheckpointConfig, Config, Layout, ModelConfig, Program, UserError, make_mesh
from jaxptd.commands.command_line import as_yaml
from jaxptd.config import nested
from jaxptd.errors import run_command
from jaxptd.generate import main as generate
from jaxptd.hf.directory import Directory
from jaxptd.hf.load import first_state
from jaxptd.hf.read import read_params, sizes_of
from jaxptd.run.checkpoints import RunCheckpoints
from jaxptd.run.folder import RunDir
from jaxptd.run.saved import restore_weights
from jaxptd.train import main as train

VOCAB = 257


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory) -> Path:
    """A model whose tokens are bytes."""
    rng = np.random.default_rng(0)
    table = rng.normal(0, 0.3, (VOCAB, 12)).astype(np.float32)
    tensors = gpt2_tensors() | {"transformer.wte.weight": table}
    return write_directory(tmp_path_factory.mktemp("hf") / "m", tensors, vocab_size=VOCAB)


@pytest.fixture
def options(bytes_model: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text(TEXT)
    values = {
        "model.from": bytes_model,
        "checkpoint.start": bytes_model,
        "data.source": tmp_path / "text.txt",
        "train.run_dir": tmp_path / "run",
        "train.platform": "cpu",
        "train.sample_tokens": 0,
        "train.eval_every": 0,
        "train.steps": 2,
        "optimizer.warmup_steps": 0,
        "optimizer.learning_rate": 1e-30,  # weights stay equal to the last bit
        "optimizer.weight_decay": 0,
    }
    return [f"--{name}={value}" for name, value in values.items()]


def params(run: jaxptd.Run) -> dict[str, np.ndarray]:
    found = run.program.canonical(run.state["params"])
    return {name: np.asarray(x) for name, x in found.items()}


def program(directory: Path, layout: Layout, **checkpoint: str) -> Program:
    model = ModelConfig(**nested(sizes_of(Directory(directory))))
    config = Config(model, layout, checkpoint=CheckpointConfig(**checkpoint))
    return Program(config, make_mesh(layout))


def arrays(program: Program, params: dict) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in jax.jit(program.canonical)(params).items()}


def test_the_state_of_step_0_has_weights_and_fresh_moments(gpt2: Path, tmp_path: Path) -> None:
    """Starts from a directory, a checkpoint of its state on another layout, and that run."""
    lines: list[str] = []
    made = program(gpt2, Layout(dp=2), start=str(gpt2))
    state = first_state(made, say=lines.append)
    assert int(state["step"]) == 0
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state["optimizer"]))
    expected = arrays(made, read_params(made, Directory(gpt2)))
    run_dir = RunDir(tmp_path / "run")
    later = {
        **state,
        "step": state["step"] + 7,
        "optimizer": jax.tree.map(ones, state["optimizer"]),
    }
    checkpoints = RunCheckpoints(made, run_dir, lines.append)
    checkpoints.save(later, 7, None)
    checkpoints.store.wait()
    for start in (run_dir.checkpoints / "00000007", run_dir.path):
        other = program(gpt2, Layout(tp=3), start=str(start))
        again = first_state(other, say=lines.append)
        assert int(again["step"]) == 0
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(again["optimizer"]))
        for name, x in arrays(other, again["params"]).items():
            np.testing.assert_array_equal(x, expected[name])
    spelled = dataclasses.replace(other.config.model, ffn_hidden_size=48, norm="layernorm")
    same = Program(dataclasses.replace(other.config, model=spelled), other.mesh)
    first_state(same, say=lines.append)
    assert [line.startswith("starting from the weights of ") for line in lines] == [True] * 4
    model = dataclasses.replace(other.config.model, tie_embeddings=False)
    changed = Program(dataclasses.replace(other.config, model=model), other.mesh)
    with pytest.raises(UserError, match=r"model.tie_embeddings=False, but .* has True"):
        first_state(changed, say=lines.append)


def test_random_draws_the_weights(gpt2: Path, tmp_path: Path, monkeypatch) -> None:
    """`random` means the same as null, even if a folder has this name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random").mkdir()
    lines: list[str] = []
    drawn, usual = (program(gpt2, Layout(), **start) for start in ({"start": "random"}, {}))
    expected = arrays(usual, usual.init_state()["params"])
    for name, x in arrays(drawn, first_state(drawn, say=lines.append)["params"]).items():
        np.testing.assert_array_equal(x, expected[name])
    assert lines == []


def ones(x: jax.Array) -> jax.Array:
    return x + 1


def test_a_config_file_may_name_the_directory_of_its_sizes(bytes_model, tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{from: {bytes_model}, dtype: bfloat16, seq_length: 8, gated: null}}")
    with pytest.warns(UserWarning, match="gives only sizes"):
        config = jaxptd.load_config(path, ["--layout.tp=3", "--model.num_layers=3"])
    expected = sizes_of(Directory(bytes_model)) | {"dtype": "bfloat16", "seq_length": 8}
    assert config.model == ModelConfig(**nested(expected | {"num_layers": 3}))
    path.write_text(as_yaml(config))
    assert "from" not in path.read_text()
    assert jaxptd.load_config(path) == config


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ("hidden_size: 24", "model.hidden_size=24, but DIR has 12; use --model.hidden_size=12"),
        ("seq_length: 17", "model.seq_length=17 is more than model.max_positions=16"),
        ("norm_eps: 1e-4", "model.norm_eps=0.0001, but DIR has 1e-05"),
        ("nonsense: 1", "unknown key model.nonsense"),
        ("dtype: int8", "model.dtype"),
    ],
)
def test_a_config_file_that_contradicts_its_directory(bytes_model, tmp_path, fields, line) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{from: {bytes_model}, {fields}}}")
    with pytest.raises(UserError) as error:
        jaxptd.load_config(path)
    assert line in str(error.value).replace(str(bytes_model), "DIR")


@pytest.mark.parametrize("value", ["nowhere", "3", "", "null", "[a]"])
def test_a_config_file_that_names_no_directory(tmp_path, value) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{from: {value}}}")
    words = "has no config.json" if value == "nowhere" else "model.from: expected a directory"
    with pytest.raises(UserError, match=words):
        jaxptd.load_config(path)


@pytest.mark.slow
def test_training_starts_from_a_directory_and_then_from_its_run(options, tmp_path, capsys) -> None:
    assert train([*options, "--layout.dp=2"]) == 0
    assert "starting from the weights of" in capsys.readouterr().out
    run = jaxptd.load(tmp_path / "run")
    assert run.config.model.num_layers == 5
    assert run.step == 2
    table = params(run)["positions.table"]
    first = tmp_path / "run" / "checkpoints" / "00000002"
    for number, start in enumerate((first, tmp_path / "run")):
        others = [f"--checkpoint.start={start}", f"--train.run_dir={tmp_path / str(number)}"]
        assert train([*options, *others, "--train.steps=1"]) == 0
        again = jaxptd.load(tmp_path / str(number))
        assert again.step == 1
        np.testing.assert_array_equal(params(again)["positions.table"], table)
    capsys.readouterr()
    assert train([*options, "--train.steps=3"]) == 0  # resumes and ignores start
    assert "resuming at step 2" in capsys.readouterr().out


@pytest.mark.slow
def test_text_is_generated_on_any_layout(bytes_model: Path, capsys) -> None:
    texts = []
    layouts = ([], ["--layout.tp=3"], ["--layout.pp=2"], ["--layout.cp=2"])
    for layout in (*layouts, ["--layout.cp=2", "--layout.row=1", "--layout.col=3"]):
        options = ["--run-dir", str(bytes_model), "--prompt=def ", "--tokens=6", "--temperature=0"]
        assert generate([*options, *layout, "--platform=cpu", "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts == texts[:1] * 5


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--model.num_layers=4", "model.num_layers=4, but "),
        (
            "--checkpoint.start=nowhere",
            "start: there is no folder nowhere; name a run, a check",
        ),
        ("--checkpoint.start=", "checkpoint.start"),
        ("--checkpoint.resume=best", "checkpoint.start="),
        ("--model.from=nowhere", "nowhere has no config.json; name a directory of a Hugging Face"),
    ],
)
def test_refused_before_anything_is_written(options, tmp_path, capsys, option, line) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(lambda: train([*options, option]))
    error = capsys.readouterr().err
    assert (end.value.code, error.count("\n")) == (2, 1)
    assert error.startswith("error: ")
    assert line in error
    assert not (tmp_path / "run").exists()


# ---- weights that no run can use ---------------------------------------------------------------

BAD = "transformer.h.3.mlp.c_fc.weight"


def test_a_nan_in_a_file_is_refused_with_its_tensor(tmp_path: Path) -> None:
    """Infinities and float32 overflows are refused as well; the count covers the whole tensor."""
    tensors = gpt2_tensors(dtype=np.float64)
    tensors[BAD][[0, 5, 11], [1, 40, 3]] = np.nan, -np.inf, 1e300
    folder = write_directory(tmp_path / "m", tensors)
    for layout in (Layout(), Layout(tp=4)):
        made = program(folder, layout, start=str(folder))
        with pytest.raises(UserError) as error:
            first_state(made, say=print)
        assert str(error.value) == (
            f"{folder}: {BAD} has 3 elements that are NaN or infinite, so every loss would be; "
            "start from other weights"
        )


def test_another_share_of_dropped_paths_starts_from_the_same_weights(tmp_path: Path) -> None:
    made = tiny.program(Layout(), family="swin", **{"images.drop_path": 0.1})
    checkpoints = RunCheckpoints(made, RunDir(tmp_path), print)
    checkpoints.save(made.init_state(), 0, None)
    checkpoints.store.wait()
    other = tiny.program(Layout(), family="swin", **{"images.drop_path": 0.3})
    found, saved = restore_weights(other, tmp_path), made.init_state()["params"]
    for name, x in arrays(other, found).items():
        np.testing.assert_array_equal(x, arrays(made, saved)[name])


def test_a_nan_in_a_checkpoint_is_refused_with_its_parameter(gpt2: Path, tmp_path: Path) -> None:
    made = program(gpt2, Layout(), start=str(gpt2))
    state = first_state(made, say=print)
    name = "blocks.mlp.up.w"
    bad = state["params"][name].at[1, 2, 3].set(np.nan).at[2, 0, 0].set(np.inf)
    checkpoints = RunCheckpoints(made, RunDir(tmp_path), print)
    checkpoints.save({**state, "params": {**state["params"], name: bad}}, 0, None)
    checkpoints.store.wait()
    with pytest.raises(UserError) as error:
        first_state(program(gpt2, Layout(), start=str(tmp_path)), say=print)
    assert str(error.value) == (
        f"{tmp_path}/checkpoints/00000000: {name} has 2 elements that are NaN or infinite, so "
        "every loss would be; start from other weights"
    )


def test_what_a_directory_says_without_effect_is_said(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "m", gpt2_tensors(tied=False))
    lines: list[str] = []
    first_state(program(folder, Layout(), start=str(folder)), say=lines.append)
    assert lines == [
        f"{folder}: tie_word_embeddings is true, but lm_head.weight and transformer.wte.weight "
        "have different numbers: they are not tied, as in transformers",
        f"starting from the weights of {folder}",
    ]


@pytest.mark.parametrize("there", [True, False])
def test_text_that_is_read_as_bytes_by_weights_of_other_tokens_is_said(
    bytes_model: Path, tmp_path: Path, there: bool
) -> None:
    rng = np.random.default_rng(0)
    size = VOCAB if there else 600
    table = rng.normal(0, 0.3, (size, 12)).astype(np.float32)
    tensors = gpt2_tensors() | {"transformer.wte.weight": table}
    folder = write_directory(tmp_path / "m", tensors, vocab_size=size)
    if there:
        (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "ids.bin").write_bytes(bytes(8))

    def said(start: Path, source: str) -> list[str]:
        made = program(start, Layout(), start=str(start))
        data = dataclasses.replace(made.config.data, source=str(tmp_path / source))
        lines: list[str] = []
        config = dataclasses.replace(made.config, data=data)
        first_state(Program(config, made.mesh), say=lines.append)
        return [line for line in lines if "bytes" in line]

    (line,) = said(folder, "text.txt")
    assert line.startswith(
        f"warning: data.tokenizer=bytes reads text as bytes, but the weights of {folder}"
    )
    assert f" know {size} other tokens; " in line
    assert ("use --data.tokenizer " if there else "own tokenizer.json") in line
    assert said(folder, "ids.bin") == said(bytes_model, "text.txt") == []
