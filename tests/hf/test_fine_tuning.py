"""A model of Hugging Face's is fine-tuned by one command, from a directory of random weights."""

import json
import math
import runpy
from pathlib import Path

import pytest
from runs import TEXT

import jaxptd
from jaxptd.hf.convert import main as convert
from jaxptd.run.folder import RunDir
from jaxptd.train import main as train

EXAMPLE = Path(jaxptd.__file__).parents[1] / "examples" / "random_weights.py"
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "head_dim": 8,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 257,
}


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    folder = tmp_path / "qwen3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3))
    runpy.run_path(str(EXAMPLE))["main"](folder)
    return folder


def test_random_weights_are_fine_tuned(qwen3: Path, tmp_path: Path, capsys) -> None:
    D, H, F, N, K = 16, 8, 24, 4, 2
    layer = 2 * D + 2 * H + 2 * D * (N + K) * H + 3 * D * F
    parameters = 257 * D + D + 2 * layer
    capsys.readouterr()
    convert(["--check", str(qwen3), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["parameters"], found["precisions"]) == (parameters, ["BF16"])

    (tmp_path / "text.txt").write_text(TEXT)
    options = {
        "model.from": qwen3,
        "checkpoint.start": qwen3,
        "model.seq_length": 32,
        "data.source": tmp_path / "text.txt",
        "optimizer.warmup_steps": 0,
        "train.run_dir": tmp_path / "run",
        "train.steps": 2,
        "train.log_every": 1,
        "train.eval_every": 0,
        "train.sample_tokens": 0,
        "train.platform": "cpu",
    }
    assert train([f"--{name}={value}" for name, value in options.items()]) == 0
    assert "starting from the weights of" in capsys.readouterr().out
    first, second = (row["loss"] for row in RunDir(tmp_path / "run").metrics())
    assert first == pytest.approx(math.log(257), abs=0.2)
    assert second < first
