"""Pairs against TRL itself, in float64: what it reads of them, its loss and its gradients."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hugging import reference
from turns import slow

import jaxptd
from jaxptd import Layout
from jaxptd.hf.directory import Directory
from jaxptd.hf.read import read_params
from jaxptd.train import main as train

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

WORDS = [f"w{number}" for number in range(17)]
PAIRS, PLACES = 8, 15  # of each pair, so that two pairs fill a sequence
ENDS = {"bos_token_id": None, "eos_token_id": 1}


def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The reference, the model that is trained, both with a tokenizer; and pairs."""
    ids = {word: number for number, word in enumerate(["[UNK]", "</s>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", unk_token="[UNK]", pad_token="</s>"
    )
    config = transformers.GPT2Config(vocab_size=len(ids), **ENDS, **reference.SIZES["gpt2"])
    for seed, name in enumerate(("reference", "model")):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += 0.1 * seed * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    draw, lines = np.random.default_rng(0), []
    for number in range(PAIRS):
        prompt, chosen = 1 + number % 3, 1 + number % 4
        sizes = {"prompt": prompt, "chosen": chosen, "rejected": PLACES - 1 - 2 * prompt - chosen}
        lines.append({name: " ".join(draw.choice(WORDS, size)) for name, size in sizes.items()})
        lines[-1] |= {name: f" {lines[-1][name]}" for name in ("chosen", "rejected")}
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return tmp_path / "reference", tmp_path / "model", path


def in_float64(model: Any) -> Any:
    """Replaces the log-probabilities of TRL's kernel, which are in float32."""

    def forward(labels: Any, *, fused_lm_head: bool, **inputs: Any) -> Any:
        assert fused_lm_head
        logits = type(model).forward(model, **inputs).logits[:, :-1]
        targets, valid = labels[:, 1:, None], labels[:, 1:] != -100
        found = logits.log_softmax(-1).gather(-1, targets.clamp(min=0))[..., 0]
        of_metrics: Any = dict.fromkeys(("entropy", "mean_logits"), torch.zeros(valid.shape))
        log_probs = torch.where(valid, found, 0)
        return SimpleNamespace(log_probs=log_probs, is_top1=valid, **of_metrics)

    model.forward = forward
    return model


def of_trl(kind: str, tmp_path: Path) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of all pairs and its gradients, by name."""
    *names, path = folders(tmp_path)
    base, model = (
        transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float64, attn_implementation="eager"
        )
        for name in names
    )
    options: dict[str, Any] = {"output_dir": str(tmp_path / "trl"), "report_to": []}
    options |= {"use_cpu": True, "bf16": False, "per_device_train_batch_size": PAIRS}
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=base,
        args=trl.DPOConfig(loss_type=kind, beta=0.2, **options),
        train_dataset=datasets.Dataset.from_json(str(path)),
        processing_class=transformers.AutoTokenizer.from_pretrained(names[1]),
    )
    for each in (trainer.model, trainer.ref_model):
        in_float64(each).eval()
    loss = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.fixture
def float64() -> Iterator[None]:
    """In all threads, also those that read checkpoints."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("sigmoid", Layout()),
        *(
            slow(*each)
            for each in (
                ("ipo", Layout()),
                ("sigmoid", Layout(dp=2, tp=2, sequence_parallel=True, zero=3)),
                ("ipo", Layout(pp=2)),
                ("ipo", Layout(cp=2)),
            )
        ),
    ],
    ids=str,
)
def test_losses_and_gradients_are_trl_s(tmp_path: Path, kind: str, layout: Layout) -> None:
    loss, expected = of_trl(kind, tmp_path)
    fields = {
        "data.source": tmp_path / "pairs.jsonl",
        "data.tokenizer": tmp_path / "reference",
        "data.validation_fraction": 0,
        "data.prompt_field": "prompt",
        "data.text_field": "chosen",
        "data.rejected_field": "rejected",
        "data.documents": "whole",
        "model.preference.loss": kind,
        "model.preference.beta": 0.2,
        "model.dtype": "float64",
        "model.seq_length": 2 * PLACES,
        "from": tmp_path / "reference",
        "train.global_batch_size": PAIRS // 2,
        "train.micro_batches": 2,
        "train.steps": 1,
        "train.run_dir": tmp_path / "run",
        "train.platform": "cpu",
    }
    words = [f"--{name}={value}" for name, value in fields.items()]
    plain = dataclasses.asdict(Layout())
    spread = {k: x for k, x in dataclasses.asdict(layout).items() if x != plain[k]}
    words += [f"--layout.{name}={json.dumps(value)}" for name, value in spread.items()]
    assert train([*words, "--quiet"]) == 0
    run = jaxptd.load(tmp_path / "run")
    params = read_params(run.program, Directory(tmp_path / "model"))
    state = run.program.states.new(params)
    batch = run.read(run.data.train, 0)
    found, _, gradients = run.program.gradients(state, batch)
    named = jaxptd.hf.names(run.program, run.program.canonical(gradients), is_canonical=True)
    assert float(found) == pytest.approx(loss, rel=1e-12)
    for name, gradient in expected.items():
        if name != "lm_head.weight":  # the table of tokens
            scale = np.abs(gradient).max()
            np.testing.assert_allclose(named[name], gradient, rtol=0, atol=1e-10 * scale)
