"""The benchmark on one GPU: its figures, its report if a trainer cannot run, and its peer."""

import dataclasses
import importlib
import itertools
import json
import math
import subprocess
import sys
import types

import numpy as np
import pytest
from command_lines import refused
from contract import relative

import jaxptd
from benchmarks.lib.pages import RESULTS
from benchmarks.one_device import __main__ as gpu
from benchmarks.one_device import trainer as gpu_trainer
from benchmarks.one_device.cases import CASES, VOCABULARY, gpt2
from jaxptd.checkpoint.canonical import to_canonical
from jaxptd.errors import UserError
from jaxptd.mesh import make_mesh
from jaxptd.step import Program

SMALL = gpt2(2, 64, 4, length=32, batch=2)
PART = "llama3-8b-8-layers"
SECONDS = [0.1] * 10 + [0.2]


def found(device: str = "NVIDIA H200", **more) -> dict:
    return {
        "seconds": SECONDS,
        "peak_bytes": 3 * 2**30,
        "device": device,
        "versions": {"jax": "1"},
        "parameters": 124_000_000,
        "attention": "cudnn",
    } | more


@pytest.mark.parametrize(
    ("name", "looked_up", "heads"),
    [("350m", "positions.table", 1024), ("qwen3-0.6b", "", 2048), (PART, "tokens.table", 4096)],
)
def test_flops_are_six_a_parameter_and_attention(name, looked_up, heads):
    case = CASES[name]
    program = Program(case.config, make_mesh(case.config.layout))
    sizes = {n: math.prod(i.shape) for n, i in program.infos.items() if i.decay and n != looked_up}
    model = case.config.model
    attention = model.num_layers * heads * model.seq_length
    assert case.flops(causal=False) == 6 * sum(sizes.values()) + 12 * attention
    assert case.flops(causal=True) == 6 * sum(sizes.values()) + 6 * attention


def test_a_line_of_the_table():
    line = gpu.row("124m", "jaxptd", found(), found(seconds=[0.15] * 11))
    cells = dict(zip(gpu.HEAD, line, strict=True))
    assert (cells["tokens/s"], cells["step ms, median"]) == ("327,680", "100.0")
    assert cells["MFU"] == f"{327680 * CASES['124m'].flops(causal=False) / 989.5e12:.1%}"
    assert cells["against torch"] == "**1.50x**"
    unknown = gpu.row("124m", "torch", found("Some GPU"), None)
    assert unknown[4] == unknown[5] == unknown[-1] == ""
    error = {"error": "no torch here"}
    lines = gpu.rows("350m", {"jaxptd": found(), "jaxptd-triton": found(), "torch": error})
    assert lines[2][3] == "not measured: no torch here" and lines[0][-1] == ""


def test_the_page_of_speed_has_figures_of_one_run_a_row():
    """Its table's rows are pairs of rows of `gpu.md`: Triton's kernels, and PyTorch below them."""
    made = [line.split(" | ") for line in (RESULTS / "gpu.md").read_text("utf-8").splitlines()]
    runs = [
        [row[1].replace(", ", " x "), *row[2:6], row[8], row[10].strip(" |*")]
        for row in made
        if len(row) == len(gpu.HEAD)
    ]
    pairs = {
        (batch, tokens, theirs[2], ratio, share, theirs[3], peak, theirs[5])
        for (batch, trainer, tokens, share, _, peak, ratio), theirs in itertools.pairwise(runs)
        if trainer == "jaxptd-triton" and theirs[1] == "torch"
    }
    models = {line[0] for line in made if len(line) == len(gpu.HEAD)} - {"| model"}
    page = (RESULTS.parents[1] / "docs" / "performance.md").read_text("utf-8").splitlines()
    shown = [tuple(line.strip("| ").split(" | ")[1:]) for line in page if "x |" in line]
    assert [row for row in shown if row not in pairs] == []
    assert len(shown) == len(models)


def test_the_last_line_is_the_result_or_the_error(monkeypatch):
    done = subprocess.CompletedProcess(
        [], 1, 'a word\n{"seconds": [1]}\n', "Trace\nValueError: no\n"
    )
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command) or done)
    assert gpu.measure("torch", "124m", 3) == {"error": "ValueError: no"}
    words = "-m benchmarks.one_device.trainer torch --case 124m --steps 3"
    assert asked[0][1:] == words.split()
    done.returncode = 0
    assert gpu.measure("jaxptd", "124m", 3) == {"seconds": [1]}


def test_results_are_a_table_and_json(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "measure", lambda *_: found())
    out = tmp_path / "gpu.md"
    assert gpu.main(["--cases", "124m", "--steps", "2", "--out", str(out)]) == 0
    text = out.read_text()
    assert "NVIDIA H200, jax 1." in text
    assert text.count("\n| 124m, 124 M") == 3
    assert json.loads(out.with_suffix(".json").read_text())["124m"]["torch"] == found()
    assert gpu.main(["--cases", "350m", "--steps", "2", "--out", str(out)]) == 0
    assert out.read_text().startswith(text)
    assert list(json.loads(out.with_suffix(".json").read_text())) == ["124m", "350m"]


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_file_that_has_no_times_is_left_alone(tmp_path, monkeypatch, text):
    monkeypatch.setattr(gpu, "measure", lambda *_: pytest.fail("measured for nothing"))
    (tmp_path / "gpu.json").write_text(text)
    with pytest.raises(UserError, match="gpu.json: no times by case; move it away"):
        gpu.main(["--cases", "124m", "--out", str(tmp_path / "gpu.md")])
    assert (tmp_path / "gpu.json").read_text() == text


def test_a_run_that_is_cut_off_keeps_the_cases_before(tmp_path, monkeypatch):
    def measure(_, name, __):
        if name == "1.5b":
            raise KeyboardInterrupt
        return found()

    monkeypatch.setattr(gpu, "measure", measure)
    out = tmp_path / "gpu.md"
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--cases", "124m", "350m", "1.5b", "--steps", "2", "--out", str(out)])
    assert [out.read_text().count(f"\n| {name}, 124 M") for name in ("124m", "350m")] == [3, 3]
    monkeypatch.setattr(gpu, "measure", lambda *_: {"error": "JAX finds no GPU"})
    with pytest.raises(UserError, match="^nothing was measured: JAX finds no GPU$"):
        gpu.main(["--cases", "124m", "--out", str(tmp_path / "none.md")])
    assert not (tmp_path / "none.md").exists()


def test_a_trainer_is_timed_after_it_has_compiled(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock) ** 2)
    losses, running, together = iter(range(7)), [], []

    def step():
        running.append(next(losses))
        together.append(len(running))
        return lambda: running.pop(0)

    assert gpu_trainer.run(gpu_trainer.Trainer(step, lambda: {"device": "x"}), 2) == {
        "seconds": [11, 13],
        "compiling": 1,
        "losses": [0, 1, 2, 3, 4, 5, 6],
        "device": "x",
    }
    assert together == [1, 1, 2, 2, 2, 2, 2]  # the first compiles; then one is always queued


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["jaxptd", "--steps=1", "--case=124m"], "error: --steps=1 must be at least 2"),
        (["jaxptd", "--case=124m"], "error: JAX finds no GPU; pip install 'jax[cuda13]'"),
        (["torch", "--case=124m"], "error: torch is not installed; pip install torch"),
        (["jaxptd", "--case=7b"], "invalid choice: '7b'"),
    ],
)
def test_a_trainer_that_cannot_start_is_one_line(argv, line, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "benchmarks.one_device.torch_trainer", raising=False)
    assert line in refused(capsys, gpu_trainer.main, argv)


def test_a_peer_that_is_not_installed_is_one_line(capsys, monkeypatch):
    def start(case):
        raise ModuleNotFoundError(name=case.peer)

    trainer = types.SimpleNamespace(start=start)
    monkeypatch.setitem(sys.modules, "benchmarks.one_device.torch_trainer", trainer)
    line = "error: transformers is not installed; pip install transformers"
    assert line in refused(capsys, gpu_trainer.main, ["torch", "--case=qwen3-0.6b"])


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["xla", "triton"])
def test_the_peer_computes_what_we_do(kernels):
    """Compares loss and every gradient in float32, from jaxptd's parameters."""
    from benchmarks.one_device import torch_gpt2  # it needs PyTorch

    torch = torch_gpt2.torch
    config = SMALL.config
    model = dataclasses.replace(config.model, dtype="float32", kernels=kernels)
    program = Program(dataclasses.replace(config, model=model), make_mesh(config.layout))
    state = program.init_state()
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (2, 33), dtype=np.int32)
    batch = program.place({"tokens": rows[:, :-1], "targets": rows[:, 1:]})
    _, metrics, grads = program.step_with_gradients(state, batch)
    peer = torch_gpt2.make(SMALL.config)
    torch_gpt2.load(
        peer, {n: np.asarray(x) for n, x in to_canonical(program, state)["params"].items()}
    )
    ids = torch.from_numpy(rows.astype(np.int64))
    loss = peer(ids[:, :-1], ids[:, 1:])
    loss.backward()
    assert loss.item() == pytest.approx(float(metrics["loss"]), rel=1e-6)
    ours = {name: np.asarray(g) for name, g in program.canonical(grads).items()}
    for name, gradient in torch_gpt2.gradients(peer).items():
        assert relative(gradient, torch_gpt2._ours(name, ours).reshape(gradient.shape)) < 1e-5, name


@pytest.mark.parametrize("name", ["qwen3-0.6b", PART])
def test_the_peer_of_transformers_computes_what_we_do(tmp_path, name):
    """Compares loss and every gradient in float32, from the peer's parameters."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch_transformers = importlib.import_module("benchmarks.one_device.torch_transformers")
    few = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "vocab_size": 96}
    few |= {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "seq_length": 32}
    config = CASES[name].config
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **few))
    torch.manual_seed(0)
    peer = torch_transformers.make(config)
    peer.model.save_pretrained(tmp_path)
    run = jaxptd.from_hf(tmp_path, dtype="float32")
    rows = np.random.default_rng(0).integers(0, 96, (2, 33), dtype=np.int32)
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
    loss, gradients = run.loss_and_gradients(batch)
    expected = peer(*(torch.from_numpy(x.astype(np.int64)) for x in batch.values()))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    found = jaxptd.hf.names(run.program, gradients)
    assert sum(x.size for x in found.values()) == sum(p.numel() for p in peer.parameters())
    for part, p in peer.model.named_parameters():
        assert relative(p.grad.numpy(), found[part]) < 1e-5, part
