"""A tiny random Llama with a tokenizer and a chat template, and what transformers answers."""

import json
from pathlib import Path
from typing import Any

from hugging import random_directory
from hugging.chat_kinds import said, write_chat_kind

LENGTH, TOKENS = 192, 12
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
CHATS = {
    "short": said("Hello"),
    "long": said("Hello world", "the quick fox", "fox 12? " * 9, system="the quick world"),
}
# Greedy answers of transformers 5.24.0 with torch 2.14.1, `TOKENS` ids each.
ANSWERS: dict[str, str] = json.loads(
    (Path(__file__).parents[2] / "golden/answers.json").read_text()
)


def write_chat_model(folder: Path) -> Path:
    """Writes the directory; weights are large enough for texts to vary."""
    from safetensors.numpy import load_file, save_file

    write_chat_kind(folder, "qwen2.5")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    size = 1 + max(
        *vocabulary["model"]["vocab"].values(), *(each["id"] for each in vocabulary["added_tokens"])
    )
    made = random_directory(folder / "made", {**LLAMA, "vocab_size": size})
    (weights,) = made.glob("*.safetensors")
    wide = {name: 8 * x.astype("float32") for name, x in load_file(weights).items()}
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((made / "config.json").read_text())
    return folder


def answer(folder: Path, messages: list[dict[str, Any]]) -> str:
    """The greedy answer of transformers."""
    import torch
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    kind: Any = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    ends = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
    found = model.generate(ids, do_sample=False, max_new_tokens=TOKENS, eos_token_id=ends)
    return tokenizer.decode(found[0, ids.shape[1] :])
