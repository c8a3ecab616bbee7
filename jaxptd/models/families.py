"""The families of models: the one place that knows a model by its family's name.

The presets of a family's options are rows of a table in `jaxptd.config.block`, its tensors in
Hugging Face's files rows of one in `jaxptd.hf.families`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from jaxptd.attention.obstacle import obstacle
from jaxptd.config import Config, FamilyName, ModelConfig
from jaxptd.config.block import FAMILIES as PRESETS
from jaxptd.config.latent import attended_sizes
from jaxptd.data import Data, Tokenizer, load_tokenizer, open_data, tokenizers
from jaxptd.errors import UserError, did_you_mean, quoted
from jaxptd.fields import checked
from jaxptd.fields.values import add_value
from jaxptd.models.decoder import DECODER
from jaxptd.models.encoder import ENCODER
from jaxptd.models.encoder_decoder import ENCODER_DECODER
from jaxptd.models.family import Family, Work
from jaxptd.parts.architecture import Architecture
from jaxptd.parts.sizes import Sizes
from jaxptd.vision.family import IMAGES, PIXELS

FAMILIES: dict[str, Family] = {
    "gpt": DECODER,
    "llama": DECODER,
    "mistral": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER,
    "bert": ENCODER,
    "t5": ENCODER_DECODER,
    "swin": IMAGES,
    "swin-unet": PIXELS,
    "mixtral": DECODER,
    "qwen2_moe": DECODER,
    "qwen3_moe": DECODER,
    "dots1": DECODER,
    "granitemoe": DECODER,
    "olmoe": DECODER,
    "olmo2": DECODER,
    "olmo3": DECODER,
    "gemma2": DECODER,
    "gemma3_text": DECODER,
    "gpt_oss": DECODER,
    "deepseek_v2": DECODER,
    "deepseek_v3": DECODER,
}


@checked("jaxptd.register_family")
def register_family(name: str, *, like: str, **changes: Any) -> None:
    """Adds a model family of your own; `model.family` accepts its name from then on.

    Call it before you use a config, in every process. A file that calls it and then
    `jaxptd.__main__.run()` has all commands; see `examples/own_model.py`.

    Args:
        name: letters, digits, `-` and `_`.
        like: an existing family, whose options, batches and losses it takes over.
        changes: fields of `jaxptd.models.family.Family` that differ: `make`, the model's class;
            `architecture`, its parts, over which all predictions are sums; `check`.

    Raises:
        UserError: the name is taken or invalid, or the family `like` or a field does not exist.
    """
    if not re.fullmatch(r"[\w-]+", name):
        raise UserError(
            f"register_family: {quoted(name)} is not a valid name; use letters, digits, - and _"
        )
    if name in FAMILIES:
        raise UserError(f"register_family: the family {quoted(name)} exists; use another name")
    if like not in FAMILIES:
        remedy = did_you_mean(like, FAMILIES, otherwise=f"use one of {', '.join(FAMILIES)}")
        raise UserError(f"register_family: there is no family {quoted(like)}; {remedy}")
    fields = [field.name for field in dataclasses.fields(Family)]
    if unknown := next((each for each in changes if each not in fields), None):
        remedy = did_you_mean(unknown, fields, otherwise=f"use {', '.join(fields)}")
        raise UserError(f"register_family: Family has no field {quoted(unknown)}; {remedy}")
    FAMILIES[name] = dataclasses.replace(FAMILIES[like], **changes)
    PRESETS[name] = PRESETS[like]
    add_value(FamilyName, name)


def family_of(model: ModelConfig) -> Family:
    """The family of a model."""
    return FAMILIES[model.family]


def architecture_of(model: ModelConfig) -> Architecture:
    """The parts of a model; cached, as formulas for many layouts ask for the same ones."""
    return _made(family_of(model).architecture, model)


def sizes_of(config: Config) -> Sizes:
    """Sizes of a config's training step on one device, for the last stack's sequences."""
    length = architecture_of(config.padded_model).stacks[-1].tokens
    return Sizes(config, length, _has_fused_attention(config))


def _has_fused_attention(config: Config) -> bool:
    """True if GPUs compute attention with a fused kernel, as chosen by `layers/attention`."""
    model, layout = config.model, config.layout
    if layout.unfused_attention or model.attention == "xla":
        return False
    reason = obstacle(
        "gpu",
        model.dtype,
        head_sizes=attended_sizes(model, layout),
        dropout=model.dropout,
        documents=family_of(model).has_documents(config),
        bias=model.block.relative is not None,
        capped=model.attention_softcap is not None,
        window_in_ring=model.reach < model.seq_length and layout.ring_size > 1,
    )
    return reason is None


def has_times(model: ModelConfig) -> bool:
    """True if the models of step time and peak memory on GPUs cover a model's parts."""
    return family_of(model).has_times


def require_times(model: ModelConfig) -> None:
    """Raises UserError for a model whose step time cannot be predicted."""
    if not has_times(model):
        raise UserError(
            f"model.family={model.family}: its step time cannot be predicted yet; use "
            "jaxptd comms and jaxptd memory, which count its bytes, or another family"
        )


@functools.lru_cache(maxsize=64)
def _made(make: Callable[[ModelConfig], Architecture], model: ModelConfig) -> Architecture:
    return make(model)


def work_of(model: ModelConfig) -> Work:
    """The work of a sample in a training step."""
    family = family_of(model)
    if family.work is not None:
        return family.work(model)
    parts = architecture_of(model)
    return Work(parts.embedded, parts.flops)


def tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer of a config, with the tokens that its model needs besides the text's.

    Raises:
        UserError: as `load_tokenizer`.
    """
    family, data = family_of(config.model), config.data
    places_its_own = family.objective is not None  # special tokens, and tokens that begin sequences
    return load_tokenizer(
        data.tokenizer,
        family.special,
        special_tokens="text" if places_its_own else data.special_tokens,
        begin_token="none" if places_its_own else data.begin_token,
    )


def with_vocabulary(config: Config) -> Config:
    """Sets model.vocab_size to the tokenizer's if it is null and the model has a vocabulary."""
    family = family_of(config.model)
    return tokenizers.with_vocabulary(config, family.special) if family.has_vocabulary else config


def open_data_of(config: Config, tokenizer: Tokenizer) -> Data:
    """Opens the data of a config in the form that its model's batches need.

    Raises:
        UserError: as `open_data`, or the model needs what no data has.
    """
    family = family_of(config.model)
    if config.model.moe and config.model.moe.replay:
        raise UserError(
            "model.moe.replay=true: data does not name the experts of tokens; leave it out, or "
            "give Program a batch made in Python"
        )
    if config.model.preference and config.data.rejected_field is None:
        raise UserError(
            f"model.preference.loss={config.model.preference.loss} needs pairs of answers; name "
            "the field of the worse ones with data.rejected_field"
        )
    if family.open is not None:
        return family.open(config)
    objective = family.objective
    return open_data(
        config.data,
        tokenizer,
        seq_length=config.model.seq_length,
        vocab_size=config.model.vocab_size or tokenizer.vocab_size,
        seed=config.train.seed,
        objective=objective and objective(config, tokenizer),
    )
