"""A tokenizer in a model's directory, its special tokens, and a `generation_config.json`."""

from pathlib import Path

import tokenizers
from runs import TEXT

WORDS = ("<unk>", "<s>", "</s>", "<|eot|>", "<pad>")
GENERATION = {
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 4,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "max_new_tokens": 64,
    "suppress_tokens": [0],
}


def write_tokenizer(folder: Path, words: tuple[str, ...], begin: str = "<s>") -> Path:
    """A tokenizer with these special tokens and some words."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [*words, *sorted(set(TEXT.split()))][:40]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(words))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, words.index(begin))]
    )
    made.save(str(folder / "tokenizer.json"))
    return folder
