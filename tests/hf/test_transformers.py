"""Loss and all gradients against transformers' models, in float64, on every kind of layout.

transformers computes RMSNorm, rotary angles and softmax in float32 even in a float64 model. Here we
patch it to float64, with our frequencies where those agree with its float32 ones.
"""

import copy
import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hugging import reference
from turns import by_turns

import jaxptd
from jaxptd import Layout
from jaxptd.config import BlockOptions
from jaxptd.config.block import Rope, frequencies
from jaxptd.hf.families import rope

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
ALL_LAYERS = {"max_window_layers": 0}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "yarn_longer": ("LlamaConfig", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 7} | ALL_LAYERS),
    "qwen3": ("Qwen3Config", {"head_dim": 6, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"head_dim": 4, "sliding_window": 6}),
}
LAYOUTS = [
    Layout(),
    Layout(tp=4, sequence_parallel=True),  # more devices than kv heads
    Layout(tp=8),
    Layout(cp=4),
    Layout(cp=4, ring="blockwise"),  # two hops with mistral's window
    Layout(cp=4, ring="rsa"),
    Layout(row=2, col=2),
    Layout(row=2, col=2, attention2d="blocks"),
    Layout(pp=2, schedule="zb-v"),
    Layout(dp=4, zero=3),
    Layout(pp=2, cp=2, tp=2, sequence_parallel=True, schedule="zb-h1"),
]
LENGTH = 16


def in_float64(model: Any, options: BlockOptions) -> Any:
    """The model with its float32 parts converted to float64."""

    def normalised(norm: Any, x: Any) -> Any:
        mean = x.pow(2).mean(-1, keepdim=True)
        return norm.weight * x * torch.rsqrt(mean + norm.variance_epsilon)

    def angles(rope: Any, x: Any, position_ids: Any) -> Any:
        turns, length = frequencies(options.rope, options.head_size)
        np.testing.assert_allclose(rope.inv_freq.numpy(), turns, rtol=1e-6)
        assert rope.attention_scaling == pytest.approx(length)
        angle = position_ids[:, :, None].double() * torch.tensor(turns)
        both = torch.cat((angle, angle), -1)
        return both.cos() * length, both.sin() * length

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = functools.partial(normalised, module)
        if kind.endswith("RotaryEmbedding"):
            module.forward = functools.partial(angles, module)
    return model


@pytest.fixture
def softmax_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim=dim)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("softmax_in_float64")
@pytest.mark.parametrize(("layout", "name"), by_turns(LAYOUTS, list(MODELS)), ids=str)
def test_loss_and_gradients_are_those_of_transformers(
    tmp_path: Path, layout: Layout, name: str
) -> None:
    torch.manual_seed(0)
    kind, options = MODELS[name]
    config = getattr(transformers, kind)(**SIZES | options)
    made = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in made.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # so that norms and biases matter
    made.save_pretrained(tmp_path)
    batch = reference.batch(37, LENGTH, rows=8)
    with jax.enable_x64(True):
        run = jaxptd.from_hf(
            tmp_path, layout=layout, dtype="float64", platform="cpu", seq_length=LENGTH
        )
        model = in_float64(reference.load(tmp_path), run.program.config.model.block)
        expected_loss, expected = reference.loss_and_gradients(model, batch)
        loss, gradients = run.loss_and_gradients(batch)
        found = jaxptd.hf.names(run.program, gradients)
        canonical = jax.device_get(run.program.canonical(run.state["params"]))
        weights = jaxptd.hf.names(run.program, canonical)
    for tensor, x in made.named_parameters():
        np.testing.assert_array_equal(weights[tensor], x.detach().numpy())
    assert abs(loss - expected_loss) < 1e-12
    assert set(found) == set(expected)
    for tensor, x in expected.items():
        scale = max(float(np.linalg.norm(x)), 1e-6)  # a key's bias has only rounding noise
        assert np.linalg.norm(found[tensor] - x) < 1e-10 * scale, tensor


def rotations() -> Iterator[dict[str, Any]]:
    """Rotations as in directories on the Hub, with keys that matter and others that do not."""
    draw = random.Random(0)
    others = {
        "beta_fast": (16, 32.0, None),
        "beta_slow": (1, 2.0, None),
        "attention_factor": (None, 1.0, 1.3),
        "mscale": (None, 1.0, 0.7),
        "mscale_all_dim": (None, 0.5),
        "truncate": (True,),
        "finetuned": (True,),
        "attn_factor": (0.9,),
    }
    for number in range(100):
        kind = ("default", "linear", "llama3", "yarn")[number % 4]
        given: dict[str, Any] = {draw.choice(("rope_type", "type")): kind, "factor": 4.0}
        if kind == "llama3":
            given |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        if kind in ("llama3", "yarn") and draw.random() < 0.8:
            given["original_max_position_embeddings"] = draw.choice((16, 32))
        if kind == "yarn":
            given |= {k: draw.choice(v) for k, v in others.items() if draw.random() < 0.4}
        names = draw.sample(("rope_scaling", "rope_parameters"), 2)
        config = {"max_position_embeddings": 128, names[0]: given}
        if draw.random() < 0.3:
            config[names[1]] = {"rope_type": "default", "rope_theta": 2e4}
        if draw.random() < 0.5:
            config["rope_theta"] = 5e5
        if draw.random() < 0.2:
            config["original_max_position_embeddings"] = 24
        yield config


@pytest.mark.slow
def test_rotations_are_those_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    for config in rotations():
        found = rope.read(copy.deepcopy(config))
        given = {name.removeprefix("rope."): x for name, x in found.items() if x is not None}
        turns, length = frequencies(Rope(**given), 16)
        theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**sizes, **config))
        np.testing.assert_allclose(theirs.inv_freq.numpy(), turns, rtol=2e-6, err_msg=str(config))
        assert theirs.attention_scaling == pytest.approx(length, rel=1e-12), config
