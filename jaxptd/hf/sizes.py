"""Converts sizes and options of a model from Hugging Face's `config.json`, and back."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxptd.config import ModelConfig, nested, option, with_fields
from jaxptd.data import Tokenizer
from jaxptd.errors import UserError, quoted
from jaxptd.hf.families import FAMILIES, Family, Json, family_named
from jaxptd.hf.families.family import activation_name, count, flag, number, read_activation

# Ids that models which write text need.
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# Keys of a base that an export drops, because its weights have other code and precision.
_NEVER_KEPT = frozenset({"auto_map", "quantization_config", "dtype", "torch_dtype"})
# Layers behind the last, which no export has; a base's number of them does not stay.
FURTHER = "num_nextn_predict_layers"
_ROPE = frozenset({"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"})
_ROPE |= {"original_max_position_embeddings"}
LONGEST = 4096  # tokens in a sequence unless the config sets them: rotary models allow 131072
# Options that are null, the family's, unless a family has keys for them.
_SCALES = ("attention_scale", "embedding_scale", "residual_scale", "logit_divisor")
# Options that a family lacks unless it says so.
_UNUSUAL: Mapping[str, Any] = MappingProxyType(
    {
        "attention_sinks": False,
        "attention_softcap": None,
        "softcap_layers": None,
        "head_sizes": None,
    }
)
_CAPS = ("attention_softcap", "logit_softcap")  # null means none, whatever a missing key means
# How to read options other than positive whole numbers.
_KINDS: Mapping[str, Callable[[str, object], Any]] = MappingProxyType(
    {
        "norm_eps": number,
        **dict.fromkeys((*_SCALES, *_CAPS), number),
        "activation": read_activation,
        "encoder_decoder.start_token": partial(count, least=0),
        "moe.normalize": flag,
        "moe.scale": number,
        "moe.first_dense": partial(count, least=0),
    }
)
# Keys of any `config.json` that change the model, and the only value that is supported.
_PLAIN: Mapping[str, Any] = MappingProxyType({"per_layer_config": None, "global_head_dim": None})


# ---- config.json -> ours ------------------------------------------------------------------------


def read_sizes(config: Json, *, tied: bool, where: object) -> dict[str, Any]:
    """The fields of `ModelConfig` that a `config.json` decides.

    Args:
        config: its content.
        tied: whether the output layer is tied to the embedding, which the tensors decide.
        where: its path, for messages.

    Raises:
        UserError: an option is missing, wrong, or not supported by this version.
    """
    try:
        options = _options(config)
        fields = options | {"tie_embeddings": tied}
        if "max_positions" in options:
            fields["seq_length"] = _length(options)
        ModelConfig(**nested(fields))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return fields


def _length(options: Json) -> int:
    """Default tokens in a sequence, for a model that allows this many positions."""
    longest: int = options["max_positions"]
    return longest if options["positions"] == "learned" else min(longest, LONGEST)


def check_sizes(
    model: ModelConfig,
    sizes: Mapping[str, Any],
    *,
    where: object,
    named: Callable[[str], str] = str,
) -> None:
    """Raises UserError, with the field, if a config contradicts the sizes of a directory.

    named: the field of a config that decides one of the model.
    """
    names = [name for name in ("seq_length", "max_positions") if name in sizes]
    lengths = {name: getattr(model, name) for name in names}
    other = with_fields(model, dict(sizes) | lengths)
    # Scales last: they follow from sizes that may differ.
    for name in sorted((n for n in sizes if n not in lengths), key=_SCALES.__contains__):
        ours, theirs = option(model, name), option(other, name)
        if ours != theirs:
            field = named(name)
            raise UserError(
                f"model.{field}={ours}, but {where} has {theirs}; use --model.{field}="
                f"{str(theirs).lower() if isinstance(theirs, bool) else theirs}, or --from "
                f"{where} for all sizes"
            )
    longest = sizes.get("max_positions") or math.inf
    if option(model, "positions") == "learned" and model.num_positions > longest:
        name = "seq_length" if model.max_positions is None else "max_positions"
        raise UserError(
            f"model.{name}={model.num_positions}, but {where} has {longest} positions; use "
            f"--model.{name}={longest} or less"
        )


def _options(config: Json) -> dict[str, Any]:
    """Every option of a `config.json`, by the names of our fields."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        kind = quoted(config.get("model_type"))
        raise UserError(f"model_type={kind}; use a model of {', '.join(FAMILIES)}")
    if quantized := config.get("quantization_config"):
        named = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        if named not in family.quantized:
            raise UserError("the weights are quantized; use those in full precision")
    for key, value in {**_PLAIN, **family.fixed, **family.unwritten}.items():
        if config.get(key, value) != value:
            only = "null" if value is None else str(value).lower()
            raise UserError(f"{key}={quoted(config[key])}; use a model with {key}={only}")
    config = with_defaults(config, family)
    options = (
        {"family": family.name, **dict.fromkeys(_UNUSUAL)}
        | dict.fromkeys(_SCALES)
        | {
            name: _option(name, key, config[key], default)
            for name, (key, default) in family.keys.items()
        }
    )
    return {**options, **family.options, **family.others(config)}


def with_defaults(config: Json, family: Family) -> Json:
    """A `config.json` completed with the keys that transformers leaves out at their defaults."""
    named = {family.synonyms[key]: x for key, x in config.items() if key in family.synonyms}
    return dict(family.keys.values()) | config | named


def _option(name: str, key: str, value: object, default: object) -> Any:
    """The value of a key; null means the default where that is null or may be missing."""
    if value is None and (default is None or name in ("num_kv_heads", *_CAPS)):
        return None
    return _KINDS.get(name, count)(key, value)


# ---- ours -> config.json ------------------------------------------------------------------------


def config_json(model: ModelConfig, *, dtype: str, tokenizer: Tokenizer | None) -> Json:
    """The `config.json` of a model.

    Args:
        model: its sizes.
        dtype: of the weights.
        tokenizer: has the ids of special tokens; None leaves them out.

    Raises:
        UserError: Hugging Face has no such family, or not with this option.
    """
    kind, family = family_named(model.family)
    unset: dict[str, Any] = dict.fromkeys(_SCALES)
    plain = dataclasses.replace(model, **unset)
    known = (*family.keys, *family.decides)
    usual = {name: option(plain, name) for name in _SCALES if name not in known}
    fixed = {**_UNUSUAL, **family.options, "mlp": "dense", **usual, "logit_softcap": None}
    for name, value in fixed.items():
        if name not in family.keys and option(model, name) != value:
            raise UserError(
                f"model.{name}={option(model, name)}: Hugging Face's {kind} has {value}; export a "
                "model with its family's options"
            )
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        **{key: _written(model, name) for name, (key, _) in family.keys.items()},
        **family.fixed,
        "tie_word_embeddings": model.tie_embeddings,
        **family.write_others(model),
        "torch_dtype": dtype,
        **(token_ids(model, tokenizer) if tokenizer else {}),
    }


def config_over_base(base: Json, model: ModelConfig, *, ours: Json) -> Json:
    """The `config.json` of a model that started from another: the base's keys with our sizes.

    The base's keys stay if they describe the same model, and so do keys that only transformers
    reads.

    Args:
        base: the content of its `config.json`.
        model: the sizes.
        ours: the `config.json` of the model, without a base.
    """
    kept = {key: value for key, value in base.items() if key not in _NEVER_KEPT}
    dtype = "dtype" if "dtype" in base else "torch_dtype"
    always = {"architectures": ours["architectures"], dtype: ours["torch_dtype"]}
    always |= {FURTHER: ours[FURTHER]} if FURTHER in ours else {}
    _, family = family_named(model.family)
    name, usual = family.keys.get("max_positions", ("", None))
    # Where transformers always ties them, a missing key means nothing.
    tied = ours["tie_word_embeddings"] if family.tied is None else family.tied
    there = {"tie_word_embeddings": tied, name: usual} | base
    differing = {
        key: ours[key] for key in ("tie_word_embeddings", name) if ours.get(key) != there[key]
    }
    merged = kept | always | differing
    if _says(merged, model):
        return merged
    changed = _ROPE | set(family.synonyms)
    return {key: value for key, value in kept.items() if key not in changed} | ours


def _says(config: Json, model: ModelConfig) -> bool:
    """True if this is the `config.json` of a model, with as many positions."""
    try:
        sizes = read_sizes(config, tied=model.tie_embeddings, where=model.family)
        check_sizes(model, sizes, where=model.family)
    except UserError:
        return False
    return sizes.get("max_positions", model.num_positions) == model.num_positions


def generation_json(model: ModelConfig, config: Json) -> Json | None:
    """The `generation_config.json` for a `config.json`; None for models that do not write text."""
    if "eos_token_id" not in family_named(model.family)[1].tokens:
        return None
    return {key: config[key] for key in TOKENS if key in config}


def _written(model: ModelConfig, name: str) -> Any:
    """An option as `config.json` has it."""
    if name == "max_positions":
        return model.num_positions
    value = option(model, name)
    return activation_name(value) if name == "activation" else value


def token_ids(model: ModelConfig, tokenizer: Tokenizer) -> Json:
    """The ids of special tokens in a `config.json`; null where the vocabulary lacks the token."""
    return {
        key: _token(model, tokenizer, key=key, name=name)
        for key, name in family_named(model.family)[1].tokens.items()
    }


def _token(
    model: ModelConfig, tokenizer: Tokenizer, *, key: str, name: str | None
) -> int | list[int] | None:
    """The id of the token with a name; None stands for what begins or ends a text."""
    ends, begins = tokenizer.ends, tokenizer.begin[:1] or (tokenizer.end_of_document,)
    unnamed = {"eos_token_id": ends, "bos_token_id": begins}
    ids = unnamed[key] if name is None else (tokenizer.token_id(name),)
    known = [each for each in ids if each is not None and each < (model.vocab_size or 0)]
    return known if len(known) > 1 else next(iter(known), None)
