"""Adapters against PEFT itself: its files here, ours there, logits, losses and gradients.

transformers computes norms and softmax of a Llama in float32, so float64 is compared with GPT-2.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hugging import reference
from turns import slow

import jaxptd
from jaxptd import Layout
from jaxptd.checkpoint.canonical import abstract_canonical, params_from_canonical
from jaxptd.hf.convert import main as convert
from jaxptd.run.saved import SavedParams

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")

VOCAB, LENGTH = 37, 16
KINDS: dict[str, tuple[str, dict]] = {
    "all": ("llama", {"target_modules": "all-linear"}),
    "queries and values": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "rslora": ("llama", {"target_modules": ["up_proj", "down_proj"], "use_rslora": True}),
    "gpt2": ("gpt2", {"target_modules": ["c_fc", "mlp.c_proj", "attn.c_proj"]}),
}


def made(folder: Path, kind: str) -> Any:
    """A model with an adapter whose matrices are random, both saved in the folder."""
    torch.manual_seed(0)
    name, options = KINDS[kind]
    config = transformers.AutoConfig.for_model(name, vocab_size=VOCAB, **reference.SIZES[name])
    base = transformers.AutoModelForCausalLM.from_config(config)
    base.save_pretrained(folder / "base")
    lora = peft.LoraConfig(
        r=3, lora_alpha=5, task_type="CAUSAL_LM", fan_in_fan_out=name == "gpt2", **options
    )
    model = peft.get_peft_model(base, lora)
    for each, parameter in model.named_parameters():
        if "lora_" in each:
            parameter.data = 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder / "adapter")
    return model


def logits(model: Any) -> np.ndarray:
    tokens = torch.tensor(batch()["tokens"])
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits.numpy()


def batch() -> dict[str, np.ndarray]:
    return reference.batch(VOCAB, LENGTH, rows=4)


def as_run(folder: Path) -> Path:
    words = ["--from-hf", str(folder / "base"), "--adapter", str(folder / "adapter")]
    convert([*words, "--out", str(folder / "run"), "--quiet"])
    return folder / "run"


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_go_there_and_back(tmp_path: Path, kind: str) -> None:
    model = made(tmp_path, kind).eval()
    expected = logits(model)
    run = as_run(tmp_path)
    for name, words in {"merged": [], "ours": ["--unmerged"]}.items():
        convert(["--to-hf", str(run), "--out", str(tmp_path / name), "--quiet", *words])
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(logits(merged), expected, rtol=1e-5, atol=1e-5)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ours = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    np.testing.assert_array_equal(logits(ours.eval()), expected)
    first, second = (
        json.loads((tmp_path / each / "adapter_config.json").read_text())
        for each in ("adapter", "ours")
    )
    assert all(first[key] == second[key] for key in ("r", "lora_alpha", "use_rslora"))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        *(
            slow(each)
            for each in (
                Layout(dp=2, tp=2, sequence_parallel=True, zero=3),
                Layout(pp=2),
                Layout(cp=2),
                Layout(tp=2, sequence_parallel=True, collective_matmul=True),
            )
        ),
    ],
    ids=str,
)
def test_losses_and_gradients_are_peft_s(tmp_path: Path, layout: Layout) -> None:
    model = made(tmp_path, "gpt2").to(torch.float64).eval()
    loss, found = reference.loss_and_gradients(model, batch())
    expected = {name.replace(".default", ""): x for name, x in found.items()}
    saved = SavedParams(as_run(tmp_path))
    lora = dataclasses.asdict(saved.config.model.lora)
    with jax.enable_x64(True):
        own = {"layout": layout, "dtype": "float64", "platform": "cpu"}
        run = jaxptd.from_hf(tmp_path / "base", **own, lora=lora)
        adapters = {
            name: jax.device_put(saved.read(name).astype(np.float64), target.sharding)
            for name, target in abstract_canonical(run.program)["params"].items()
            if ".lora." in name
        }
        begun = params_from_canonical(run.program, {"params": adapters})
        run.state = {**run.state, "params": {**run.state["params"], **begun}}
        result = run.loss_and_gradients(batch())
        gradients = jaxptd.hf.names(run.program, result.gradients)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-10 * scale)
