"""Families of models in Hugging Face's files, each described as data in its own file."""

from collections.abc import Mapping
from types import MappingProxyType

from jaxptd.errors import UserError, quoted
from jaxptd.hf.families.bert import BERT
from jaxptd.hf.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from jaxptd.hf.families.experts import DOTS1, GRANITEMOE, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from jaxptd.hf.families.family import Family, Json, Tensors
from jaxptd.hf.families.gemma import GEMMA2, GEMMA3_TEXT
from jaxptd.hf.families.gpt2 import GPT2
from jaxptd.hf.families.gpt_oss import GPT_OSS
from jaxptd.hf.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from jaxptd.hf.families.olmo import OLMO2, OLMO3
from jaxptd.hf.families.swin import SWIN
from jaxptd.hf.families.swin_unet import SWIN_UNET
from jaxptd.hf.families.t5 import T5

# `model_type` of a `config.json` -> its family.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": GPT2,
        "llama": LLAMA,
        "mistral": MISTRAL,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "bert": BERT,
        "t5": T5,
        "swin": SWIN,
        "swin-unet": SWIN_UNET,
        "mixtral": MIXTRAL,
        "qwen2_moe": QWEN2_MOE,
        "qwen3_moe": QWEN3_MOE,
        "dots1": DOTS1,
        "granitemoe": GRANITEMOE,
        "olmoe": OLMOE,
        "olmo2": OLMO2,
        "olmo3": OLMO3,
        "gemma2": GEMMA2,
        "gemma3_text": GEMMA3_TEXT,
        "gpt_oss": GPT_OSS,
        "deepseek_v2": DEEPSEEK_V2,
        "deepseek_v3": DEEPSEEK_V3,
    }
)


def family_named(name: str) -> tuple[str, Family]:
    """The `model_type` and the family for one of our names. Raises UserError if there is none."""
    for kind, family in FAMILIES.items():
        if family.name == name:
            return kind, family
    names = ", ".join(family.name for family in FAMILIES.values())
    raise UserError(f"model.family={quoted(name)} has no Hugging Face format; use one of {names}")
