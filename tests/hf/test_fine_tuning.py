"""One command fine-tunes a Hugging Face model, here a directory of random weights."""

import json
import math
from pathlib import Path

import pytest
from hugging import random_directory
from runs import TEXT

from jaxptd.hf.convert import main as convert
from jaxptd.run.folder import RunDir
from jaxptd.train import main as train

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


BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 261,
}
T5 = {
    "model_type": "t5",
    "d_ff": 24,
    "d_kv": 4,
    "d_model": 16,
    "decoder_start_token_id": 0,
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": 358,
}


@pytest.mark.slow
def test_random_weights_are_fine_tuned(tmp_path: Path, capsys) -> None:
    D, H, F, N, K = 16, 8, 24, 4, 2
    layer = 2 * D + 2 * H + 2 * D * (N + K) * H + 3 * D * F
    parameters = 257 * D + D + 2 * layer
    qwen3 = random_directory(tmp_path / "qwen3", QWEN3)
    capsys.readouterr()
    convert(["--check", str(qwen3), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["parameters"], found["precisions"]) == (parameters, ["BF16"])
    first, second = losses(qwen3, tmp_path)
    assert "starting from the weights of" in capsys.readouterr().out
    assert first == pytest.approx(math.log(257), abs=0.2)
    assert second < first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "loss"),
    [(BERT, math.log(261) + math.log(2)), (T5, math.log(358))],
    ids=["bert", "t5"],
)
def test_encoders_are_fine_tuned(tmp_path: Path, config: dict, loss: float) -> None:
    first, second = losses(random_directory(tmp_path / "model", config), tmp_path, tp=2)
    assert first == pytest.approx(loss, abs=0.2)
    assert second < first


def losses(folder: Path, tmp_path: Path, *, tp: int = 1) -> list[float]:
    """The losses of two steps that start from a directory."""
    (tmp_path / "text.txt").write_text(TEXT)
    options = {
        "model.from": folder,
        "checkpoint.start": folder,
        "model.seq_length": 32,
        "layout.tp": tp,
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
    return [row["loss"] for row in RunDir(tmp_path / "run").metrics()]
