"""A family of models in Hugging Face's files: the keys of its `config.json`, and its tensors."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxptd.config import ModelConfig
from jaxptd.errors import UserError, quoted
from jaxptd.hf.dims import Rule

# ---- activations by transformers' names ----------------------------------------------------------

_OURS: Mapping[str, str] = MappingProxyType(
    {
        "gelu_new": "gelu-tanh",
        "gelu_pytorch_tanh": "gelu-tanh",
        "gelu_python_tanh": "gelu-tanh",
        "gelu_fast": "gelu-tanh",
        "gelu": "gelu",
        "gelu_python": "gelu",
        "relu": "relu",
        "silu": "silu",
        "swish": "silu",
    }
)
_THEIRS: Mapping[str, str] = MappingProxyType(
    {"gelu-tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"}
)


def read_activation(key: str, value: object) -> str:
    """Our activation for the value of a key. Raises UserError if there is none."""
    if str(value) not in _OURS:
        raise UserError(f"{key}={quoted(value)}; use a model with one of {', '.join(_OURS)}")
    return _OURS[str(value)]


def activation_name(name: str) -> str:
    """The name of our activation."""
    return _THEIRS[name]


Json = dict[str, Any]

_ENDS: Mapping[str, None] = MappingProxyType({"bos_token_id": None, "eos_token_id": None})


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of a family. `dims.py` explains the notation of a rule.

    Letters: L layers, E experts, D model, V vocabulary, T positions, F hidden, N heads, K heads of
    keys and values, H head size, P pairs of H that are rotated, C queries, keys and values.

    Args:
        prefix: of names, which a file may leave out.
        rules: for the tensors of every option; only rules whose parameter the model has apply.
            Those of `blocks` also apply to stacks that are runs of its layers, such as `blocks_3`.
        ignored: regular expressions of names, without the prefix, that hold no parameter.
        aliases: regular expressions of alternative names in files, with the prefix, and the name
            that each stands for.
        needs: our parameters without which a model cannot have these tensors.
        alternatives: rules of other tensors that files may have in place of a parameter's usual
            ones. They are read, and never written.
        zeros: our parameters that no file has, because they are zero in every such model.
        further: names of tensors that only layers behind the last have, for other predictions.
            Nothing of such a layer is read without `model.mtp`.
        of_modules: copies of tables in each of these layers, with a `{}` for its number, and our
            name of the table.
    """

    prefix: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]
    needs: tuple[str, ...] = ()
    alternatives: tuple[Rule, ...] = ()
    zeros: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    of_modules: tuple[tuple[str, str], ...] = ()

    def others(self, name: str) -> Iterator[str]:
        """The names that a file's name may stand for, with or without the prefix."""
        for pattern, real in self.aliases:
            for each in (name, f"{self.prefix}{name}"):
                if match := re.fullmatch(pattern, each):
                    yield match.expand(real)


@dataclasses.dataclass(frozen=True)
class Family:
    """A family.

    Args:
        name: our name of the family.
        architecture: the class in transformers that has all tensors.
        tensors: the tensors of a file.
        keys: our option -> its key in `config.json`, and the value if the key is missing.
        synonyms: another name of a key -> the key, as in transformers' `attribute_map`.
        options: options that every model of the family has.
        fixed: key -> the only supported value, which is also the default.
        unwritten: like `fixed`, for keys that files contain only if they differ.
        tied: value of `tie_word_embeddings` if the key is missing. None where transformers ignores
            the key and always ties, as it also does if the tables are equal or one is missing.
        remarks: lines about entries of a `config.json` without effect.
        others: reads the options that take more than one key.
        write_others: writes their keys.
        decides: options among these that other families leave null.
        quantized: values of `quant_method` whose tensors are read, see `mxfp4.py`.
        tokens: key -> the name of the special token whose id it holds. None is the token that ends
            a document.
    """

    name: str
    architecture: str
    tensors: Tensors
    keys: Mapping[str, tuple[str, Any]]
    options: Mapping[str, Any]
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unwritten: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tied: bool | None = None
    remarks: Callable[[Json], list[str]] = lambda config: []
    others: Callable[[Json], Json] = lambda config: {}
    write_others: Callable[[ModelConfig], Json] = lambda model: {}
    decides: tuple[str, ...] = ()
    quantized: tuple[str, ...] = ()
    tokens: Mapping[str, str | None] = dataclasses.field(default_factory=lambda: _ENDS)


class Keys(NamedTuple):
    """Reads and writes options of a family that one key of a `config.json` does not decide alone.

    read: a `config.json` -> our options. write: our options -> its keys.
    """

    read: Callable[[Json], Json]
    write: Callable[[ModelConfig], Json]


# ---- values of a config.json ---------------------------------------------------------------------

LARGEST = 2**31 - 1  # limit for whole numbers; larger sizes are mistakes


def count(key: str, value: object, least: int = 1) -> int:
    """A whole number. Raises UserError, with the key, for anything else and below `least`."""
    if type(value) is not int or value < least:
        span = f"above {least - 1}" if least else "of 0 or more"
        raise UserError(f"{key}={_shown(value)}; it must be a whole number {span}")
    if value > LARGEST:
        raise UserError(f"{key}={_shown(value)}; it must be {LARGEST} or less")
    return value


def number(key: str, value: object) -> float:
    """A number above 0. Raises UserError, with the key, for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{key}={_shown(value)}; it must be a number above 0")
    return float(value)


def flag(key: str, value: object) -> bool:
    """True or false. Raises UserError, with the key, for anything else."""
    if not isinstance(value, bool):
        raise UserError(f"{key}={_shown(value)}; it must be true or false")
    return value


def _shown(value: object) -> str:
    """A value for a message; text keeps its quotes, as in the file: "2" is not the number 2."""
    return f'"{quoted(value)}"' if isinstance(value, str) else quoted(value)
