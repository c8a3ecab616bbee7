"""Writes a tiny Llama with a tokenizer and random weights, in the Hub's files, to try things out.

`python examples/tiny_model.py DIR` trains a byte-level BPE tokenizer of 1,024 tokens on the source
code of the standard library. It writes `tokenizer.json` (texts begin with `<s>`),
`tokenizer_config.json`, `chat_template.jinja`, `config.json`, `generation_config.json` (`</s>` and
`<|end|>` end a text) and `model.safetensors` into DIR. Downloads nothing. Needs the `hf` extra.
"""

import json
import sys
from pathlib import Path
from typing import Any

import random_weights
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxptd.data.sources import find_files

SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>")
VOCABULARY = 1024
TEXT = 2**20  # characters that the tokenizer is trained on
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": SPECIAL.index("<s>"),
    "eos_token_id": SPECIAL.index("</s>"),
}
GENERATION = {
    "bos_token_id": SPECIAL.index("<s>"),
    "eos_token_id": [SPECIAL.index("</s>"), SPECIAL.index("<|end|>")],
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "model_max_length": 256,
    "clean_up_tokenization_spaces": False,
}


def tokenizer() -> Tokenizer:
    """Trains a byte-level BPE in seconds; it puts the begin token in front of every text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in find_files("stdlib"))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["".join(texts)[:TEXT]], trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", SPECIAL.index("<s>"))]
    )
    return made


def main(folder: Path) -> None:
    """Writes the directory."""
    folder.mkdir(parents=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    files = {"config": CONFIG, "generation_config": GENERATION, "tokenizer_config": TOKENIZER}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    random_weights.main(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
