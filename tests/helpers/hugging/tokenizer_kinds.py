"""Directories with each kind of tokenizer found on the Hub, with tiny vocabularies."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

SPACE, BYTE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
WORDS = ("Hello", "world", "the", "quick", "brown", "fox")
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
Files = Mapping[str, Any]

TEXTS = (
    *("", "Hello", " Hello world", "  the quick", "the\n\n  quick\tbrown ", "fox 12345, don't"),
    *("caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{GRINNING FACE}", "cafe\N{COMBINING ACUTE ACCENT}"),
)


def texts(special: Iterable[str]) -> list[str]:
    """Plain texts, and some that contain the spelling of special tokens."""
    spelled = ("{0}", "Hello{0}the", "Hello {0} the{0}{0} fox")
    return [*TEXTS, *(text.format(name) for name in special for text in spelled)]


def merged(
    words: tuple[str, ...], known: list[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of prefixes of words, and the merges that build them."""
    merges = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    merges = list(dict.fromkeys(merges))
    names = dict.fromkeys([*known, *map("".join, merges)])
    return {name: number for number, name in enumerate(names)}, merges


def of_bytes(special: tuple[str, ...], split: str | None = None) -> Tokenizer:
    """A byte-level BPE like GPT-2's."""
    words = (*(BYTE_SPACE + word for word in WORDS), *WORDS)
    vocabulary, merges = merged(words, sorted(pre_tokenizers.ByteLevel.alphabet()))
    made = Tokenizer(models.BPE(vocabulary, merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    parts = [pre_tokenizers.Split(Regex(split), "isolated"), level] if split else [level]
    made.pre_tokenizer = pre_tokenizers.Sequence(parts) if split else level
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


def of_pieces(special: tuple[str, ...], *, prefix: bool) -> Tokenizer:
    """A SentencePiece-style BPE with byte fallback. prefix: whether a space is prepended."""
    words = (*(SPACE + word for word in WORDS), *WORDS)
    letters = [*(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *sorted(set("".join(WORDS)))]
    vocabulary, merges = merged(words, [*special, *letters])
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    made = Tokenizer(model)
    first = [normalizers.Prepend(SPACE)] if prefix else []
    made.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    pieces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*pieces, *strip])
    made.add_special_tokens(list(special))
    return made


def begun(made: Tokenizer, begin: str, *, within: bool = False, trim: bool = False) -> Tokenizer:
    """The tokenizer with a post-processor that begins texts, alone or within a sequence.

    trim: the places of tokens leave out their spaces.
    """
    number = made.token_to_id(begin)
    template = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, number)])
    level = processors.ByteLevel(trim_offsets=trim)
    made.post_processor = processors.Sequence([level, template]) if within else template
    return made


def llama2(**settings: Any) -> tuple[Tokenizer, Files]:
    made = begun(of_pieces(("<unk>", "<s>", "</s>"), prefix=True), "<s>")
    settings = {"tokenizer_class": "LlamaTokenizer", **LLAMA, **settings}
    return made, {"tokenizer_config": settings, "config": {"model_type": "llama"}}


def mistral() -> tuple[Tokenizer, Files]:
    made, files = llama2()
    return made, {**files, "config": {"model_type": "mistral"}}


def yi() -> tuple[Tokenizer, Files]:
    special = ("<unk>", "<|startoftext|>", "<|endoftext|>", "<|im_end|>")
    names = {"bos_token": special[1], "eos_token": special[2], "unk_token": special[0]}
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, **names}
    config, generation = {"model_type": "llama", "eos_token_id": 2}, {"eos_token_id": 3}
    files = {"tokenizer_config": settings, "config": config, "generation_config": generation}
    return of_pieces(special, prefix=False), files


def llama3() -> tuple[Tokenizer, Files]:
    made = of_bytes(("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"), SPLIT)
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    ends = [made.token_to_id("<|end_of_text|>"), made.token_to_id("<|eot_id|>")]
    files = {"tokenizer_config": settings, "generation_config": {"eos_token_id": ends}}
    return begun(made, "<|begin_of_text|>", within=True), files | {
        "config": {"model_type": "llama"}
    }


def gpt2() -> tuple[Tokenizer, Files]:
    name = "<|endoftext|>"
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": name, "eos_token": name}
    files = {"tokenizer_config": settings | {"add_bos_token": True}}
    return of_bytes((name,)), files | {"config": {"model_type": "gpt2"}}


def qwen2() -> tuple[Tokenizer, Files]:
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    made = of_bytes(special, QWEN)
    made.normalizer = normalizers.NFC()
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, **names}
    settings["additional_special_tokens"] = [*special[1:], "<|vision|>"]
    return made, {"tokenizer_config": settings, "config": {"model_type": "qwen2"}}


def gemma() -> tuple[Tokenizer, Files]:
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<end_of_turn>")
    made = begun(of_pieces(special, prefix=False), "<bos>")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    names = {f"{name.strip('<>')}_token": name for name in special[:4]}
    settings = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, **names}
    return made, {"tokenizer_config": settings, "config": {"model_type": "gemma"}}


def flags() -> tuple[Tokenizer, Files]:
    """Flags and new tokens of `tokenizer_config.json` that `tokenizer.json` lacks."""
    made, files = llama3()
    at = {"single_word": False, "normalized": False}
    begin = {"content": "<|begin_of_text|>", "lstrip": True, "rstrip": True, "special": True, **at}
    new = {"content": "<|new|>", "lstrip": False, "rstrip": True, "special": False, **at}
    listed = {str(made.token_to_id("<|begin_of_text|>")): begin, "999": new}
    settings = {**files["tokenizer_config"], "added_tokens_decoder": listed, "mask_token": "[M]"}
    return made, {**files, "tokenizer_config": settings | {"image_token": "<|image|>"}}


def old() -> tuple[Tokenizer, Files]:
    """The files that directories had before `added_tokens_decoder`."""
    made, files = llama3()
    end = {"content": "<|eot_id|>", "lstrip": False, "rstrip": True, "normalized": False}
    names = {"eos_token": end | {"single_word": False}, "additional_special_tokens": ["<|more|>"]}
    tokens = {"<|more|>": 900, "Hello": 901}
    del files["generation_config"]
    return made, {**files, "special_tokens_map": names, "added_tokens": tokens}


KINDS: dict[str, Callable[[], tuple[Tokenizer, Files]]] = {
    "llama2": llama2,
    "llama2 legacy": lambda: llama2(legacy=True, tokenizer_class="LlamaTokenizerFast"),
    "llama2 without a prefix": lambda: llama2(add_prefix_space=False),
    "an added pad": lambda: llama2(pad_token="[PAD]", tokenizer_class="PreTrainedTokenizerFast"),
    **{made.__name__: made for made in (mistral, yi, llama3, gpt2, qwen2, gemma, flags, old)},
}


def write_kind(folder: Path, name: str) -> Path:
    """Writes a directory with a tokenizer and its other files."""
    folder.mkdir(parents=True)
    made, files = KINDS[name]()
    made.save(str(folder / "tokenizer.json"))
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return folder
