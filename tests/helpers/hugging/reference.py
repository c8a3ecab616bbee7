"""The same loss and gradients from transformers, in float64; needs torch and transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np

# Of tiny models, by transformers' names of their kinds.
SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": 32},
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
}


def load(directory: Path) -> Any:
    """The model of a directory, in float64.

    transformers computes GPT-2's attention in the model's precision with the eager kernel; only its
    loss is in float32, so `loss_and_gradients` replaces it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager"
    )
    return model.eval()


def loss_and_gradients(
    model: Any, batch: dict[str, np.ndarray]
) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss over targets of 0 or more, and the gradients by name."""
    import torch

    tokens, targets = (torch.tensor(batch[name]).long() for name in ("tokens", "targets"))
    logits = model(input_ids=tokens, use_cache=False).logits
    assert logits.dtype == torch.float64
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-1
    )
    model.zero_grad()
    loss.backward()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    grads = {name: p.grad.numpy() for name, p in trained}
    return loss.item(), grads


def batch(vocab_size: int, length: int, *, rows: int = 3) -> dict[str, np.ndarray]:
    """Random tokens; some targets are ignored."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, vocab_size, (rows, length + 1))
    targets = np.where(rng.random((rows, length)) < 0.2, -1, ids[:, 1:])
    return {"tokens": ids[:, :-1], "targets": targets}


def summary(x: np.ndarray) -> list[float]:
    """The norm of an array, and its dot product with a fixed one, which detects permutations."""
    flat = np.asarray(x, np.float64).ravel()
    return [float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(flat.size)))]


def write_golden(directory: Path, path: Path, *, length: int, vocab_size: int) -> None:
    """Writes the loss of a directory's model, a summary of each gradient, and the last logits."""
    import torch

    model, inputs = load(directory), batch(vocab_size, length)
    loss, grads = loss_and_gradients(model, inputs)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(inputs["tokens"])).logits.numpy()
    found = {
        "loss": loss,
        "logits": summary(logits),
        "gradients": {name: summary(grad) for name, grad in grads.items()},
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def check_summaries(gradients: dict[str, Any], expected: dict[str, Any]) -> None:
    """Asserts that gradients match their summaries in a golden file."""
    assert set(gradients) == set(expected)
    for name, numbers in expected.items():
        scale = max(numbers[0], 1e-3)  # the gradient of a key's bias is zero except for rounding
        found = summary(gradients[name])
        np.testing.assert_allclose(found, numbers, rtol=0, atol=1e-10 * scale, err_msg=name)
