"""Sizes and options of a model from the `config.json` of Hugging Face, and back."""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

from jaxptd.config import ModelConfig, option
from jaxptd.errors import UserError, quoted
from jaxptd.hf import rope
from jaxptd.hf.window import ALWAYS, BY_LAYER, NEVER, Windows

LONGEST = 4096  # tokens in a sequence, unless the config says so: rotary models allow 131072

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models in `config.json`.

    Args:
        name: ours.
        architecture: the class of transformers.
        keys: our option -> its key, and the value where the key is missing.
        options: that every model of the family has.
        fixed: key -> the only value that is supported, which is also the default.
        others: reads the options for which a key is not enough.
        write_others: their keys.
    """

    name: str
    architecture: str
    keys: Mapping[str, tuple[str, Any]]
    options: Mapping[str, Any]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    others: Callable[[Json], Json] = lambda config: {}
    write_others: Callable[[ModelConfig], Json] = lambda model: {}


_GPT2 = Family(
    "gpt",
    "GPT2LMHeadModel",
    keys={
        "num_layers": ("n_layer", 12),
        "hidden_size": ("n_embd", 768),
        "num_heads": ("n_head", 12),
        "ffn_hidden_size": ("n_inner", None),
        "vocab_size": ("vocab_size", 50257),
        "max_positions": ("n_positions", 1024),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "activation": ("activation_function", "gelu_new"),
    },
    options={
        "norm": "layernorm",
        "norm_order": "pre",
        "gated": False,
        "linear_bias": "all",
        "positions": "learned",
        "qk_norm": False,
        "window": None,
    },
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
)
_LLAMA_KEYS = {
    "num_layers": ("num_hidden_layers", 32),
    "hidden_size": ("hidden_size", 4096),
    "num_heads": ("num_attention_heads", 32),
    "num_kv_heads": ("num_key_value_heads", None),
    "head_size": ("head_dim", None),
    "ffn_hidden_size": ("intermediate_size", 11008),
    "vocab_size": ("vocab_size", 32000),
    "max_positions": ("max_position_embeddings", 2048),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "activation": ("hidden_act", "silu"),
}
_LLAMA_OPTIONS = {"norm": "rmsnorm", "norm_order": "pre", "gated": True, "positions": "rope"}


def _llama(
    name: str, architecture: str, keys: Json, *, windows: Windows = NEVER, **others: Any
) -> Family:
    """A family whose models are llamas with other options."""
    options = _LLAMA_OPTIONS | {"linear_bias": "none", "qk_norm": False} | others.pop("options", {})
    return Family(
        name,
        architecture,
        keys=_LLAMA_KEYS | keys,
        options=options,
        others=lambda config: rope.read(config) | windows.read(config),
        write_others=lambda model: rope.write(model) | windows.write(model),
        **others,
    )


_NO_BIAS = {"attention_bias": False}
# `model_type` of a `config.json` -> its family.
FAMILIES: Mapping[str, Family] = types.MappingProxyType(
    {
        "gpt2": _GPT2,
        "llama": _llama(
            "llama",
            "LlamaForCausalLM",
            {},
            options={"window": None},
            fixed=_NO_BIAS | {"mlp_bias": False},
        ),
        "mistral": _llama(
            "mistral",
            "MistralForCausalLM",
            {
                "ffn_hidden_size": ("intermediate_size", 14336),
                "num_kv_heads": ("num_key_value_heads", 8),
                "max_positions": ("max_position_embeddings", 131072),
            },
            windows=ALWAYS,
        ),
        "qwen2": _llama(
            "qwen2",
            "Qwen2ForCausalLM",
            {
                "vocab_size": ("vocab_size", 151936),
                "num_kv_heads": ("num_key_value_heads", 32),
                "ffn_hidden_size": ("intermediate_size", 22016),
                "max_positions": ("max_position_embeddings", 32768),
            },
            options={"linear_bias": "qkv"},
            windows=BY_LAYER,
        ),
        "qwen3": _llama(
            "qwen3",
            "Qwen3ForCausalLM",
            {
                "vocab_size": ("vocab_size", 151936),
                "num_kv_heads": ("num_key_value_heads", 32),
                "head_size": ("head_dim", 128),
                "ffn_hidden_size": ("intermediate_size", 22016),
                "max_positions": ("max_position_embeddings", 32768),
            },
            options={"qk_norm": True},
            windows=BY_LAYER,
            fixed=_NO_BIAS,
        ),
    }
)
_ACTIVATIONS = {
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_ACTIVATION_NAMES = {"gelu-tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"}


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
    if str(found["activation"]) not in _ACTIVATIONS:
        key, names = family.keys["activation"][0], ", ".join(_ACTIVATIONS)
        raise UserError(f"{key}={quoted(found['activation'])}; use a model with one of {names}")
    found["activation"] = _ACTIVATIONS[str(found["activation"])]
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
    kind = _model_type(model.family)
    family = FAMILIES[kind]
    end = end_of_document if end_of_document < (model.vocab_size or 0) else None
    found = {name: option(model, name) for name in family.keys}
    found["max_positions"] = model.num_positions
    found["activation"] = _ACTIVATION_NAMES[found["activation"]]
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


def _model_type(family: str) -> str:
    for kind, each in FAMILIES.items():
        if each.name == family:
            return kind
    families = ", ".join(each.name for each in FAMILIES.values())
    raise UserError(
        f"model.family={family} is not read from or written to Hugging Face's files; use one of "
        f"{families}"
    )
