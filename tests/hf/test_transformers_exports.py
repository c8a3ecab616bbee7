"""transformers reads an export as it reads the base: config, chat template, greedy texts."""

import json
from pathlib import Path
from typing import Any

import pytest
from hugging import random_directory
from hugging.tokenizer import GENERATION, WORDS, write_tokenizer

from jaxptd.hf.convert import main as convert

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOW = {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2}
MODELS = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.2},
    "llama": LLAMA | {"rope_theta": 5e5, "dtype": "bfloat16", "attention_dropout": 0.1},
    "qwen2": LLAMA | WINDOW | {"tie_word_embeddings": True},
    "qwen3": LLAMA | {"head_dim": 8, "rope_parameters": YARN},
}
IDS = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 4}
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }} <|eot|>{% endfor %}"
OWN = {"_name_or_path", "dtype", "torch_dtype", "architectures", "transformers_version"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_an_export_is_read_as_its_base(kind: str, tmp_path: Path) -> None:
    there, run, back = (tmp_path / name for name in ("there", "run", "back"))
    random_directory(there, {"model_type": kind, **MODELS[kind], **IDS})
    write_tokenizer(there, WORDS)
    files = {"generation_config": GENERATION, "tokenizer_config": SETTINGS}
    for name, content in files.items():
        (there / f"{name}.json").write_text(json.dumps(content))
    (there / "chat_template.jinja").write_text(TEMPLATE)
    convert(["--from-hf", str(there), "--out", str(run), "--quiet"])
    convert(["--to-hf", str(run), "--out", str(back), "--quiet"])
    one, other = (Read(path) for path in (there, back))
    assert other.config == one.config
    assert other.generation == one.generation
    assert other.chat == one.chat == "<s>def a, <|eot|>"
    assert other.greedy == one.greedy


class Read:
    """A directory as transformers reads it."""

    def __init__(self, path: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(path).to_dict()
        self.config = {key: value for key, value in config.items() if key not in OWN}
        self.generation = transformers.GenerationConfig.from_pretrained(path).to_dict()
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
        messages = [{"role": "user", "content": "def a,"}]
        self.chat = tokenizer.apply_chat_template(messages, tokenize=False)
        kind = transformers.AutoModelForCausalLM
        model = kind.from_pretrained(path, dtype=torch.float32)
        ids = tokenizer("def a,", return_tensors="pt")["input_ids"]
        found = model.generate(ids, do_sample=False, max_new_tokens=12)
        self.greedy = found.tolist()
