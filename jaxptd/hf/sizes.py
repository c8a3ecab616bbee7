"""Sizes and options of a model from the `config.json` of Hugging Face, and back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxptd.config import ModelConfig, option
from jaxptd.errors import UserError, quoted
from jaxptd.hf.families import FAMILIES, Json, activation, family_named

LONGEST = 4096  # tokens in a sequence, unless the config says so: rotary models allow 131072


# ---- config.json -> ours ------------------------------------------------------------------------


def read_sizes(config: Json, *, tied: bool, where: object) -> dict[str, Any]:
    """The fields of `ModelConfig` that a `config.json` decides.

    Args:
        config: its content.
        tied: whether the output layer is the embedding, which the tensors decide.
        where: its path, for messages.

    Raises:
        UserError: an option is missing, wrong, or none that this version has.
    """
    try:
        options = _options(config)
        fields = options | {"tie_embeddings": tied}
        longest = options["max_positions"]
        _check_count("positions", longest)
        learned = options["positions"] == "learned"
        fields["seq_length"] = longest if learned else min(longest, LONGEST)
        ModelConfig(**fields)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return fields


def check_sizes(model: ModelConfig, sizes: Mapping[str, Any], *, where: object) -> None:
    """Raises UserError, with the field, if a config contradicts the sizes of a directory."""
    lengths = {name: getattr(model, name) for name in ("seq_length", "max_positions")}
    there = dataclasses.replace(model, **(dict(sizes) | lengths))
    for name in (name for name in sizes if name not in lengths):
        mine, wanted = option(model, name), option(there, name)
        if mine != wanted:
            raise UserError(
                f"model.{name}={mine}, but {where} has {wanted}; use --model.{name}="
                f"{str(wanted).lower() if isinstance(wanted, bool) else wanted}, or --model.from "
                f"{where} for all sizes"
            )
    longest = sizes["max_positions"]
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
    if config.get("quantization_config"):
        raise UserError("the weights are quantized; use those in full precision")
    for key, value in family.fixed.items():
        if config.get(key, value) != value:
            only = str(value).lower()
            raise UserError(f"{key}={quoted(config[key])}; use a model with {key}={only}")
    found = {name: config.get(key, default) for name, (key, default) in family.keys.items()}
    for name in ("num_layers", "hidden_size", "num_heads", "vocab_size"):
        _check_count(family.keys[name][0], found[name])
    found["activation"] = activation.read(family.keys["activation"][0], found["activation"])
    found |= {"family": family.name, "attention_scale": None}
    return {**found, **family.options, **family.others(config)}


def _check_count(key: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise UserError(f"{key}={quoted(value)}; it must be a whole number above 0")


# ---- ours -> config.json ------------------------------------------------------------------------


def config_json(model: ModelConfig, *, dtype: str, end_of_document: int) -> Json:
    """The `config.json` of a model.

    Args:
        model: its sizes.
        dtype: of the weights.
        end_of_document: id that ends a document; left out if the vocabulary does not have it.

    Raises:
        UserError: the family has no Hugging Face model, or not with this option.
    """
    kind, family = family_named(model.family)
    end = end_of_document if end_of_document < (model.vocab_size or 0) else None
    found = {name: option(model, name) for name in family.keys}
    found["max_positions"] = model.num_positions
    found["activation"] = activation.write(found["activation"])
    usual = dataclasses.replace(model, attention_scale=None).block.attention_scale
    for name, value in [*family.options.items(), ("attention_scale", usual)]:
        if option(model, name) != value:
            raise UserError(
                f"model.{name}={option(model, name)}: a {kind} of Hugging Face has {value}; export "
                "a model with its family's options"
            )
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        **{key: found[name] for name, (key, _) in family.keys.items()},
        **family.fixed,
        **family.write_others(model),
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": end,
        "eos_token_id": end,
    }
