"""Activations by transformers' names."""

from collections.abc import Mapping
from types import MappingProxyType

from jaxptd.errors import UserError, quoted

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


def read(key: str, value: object) -> str:
    """Our activation for the value of a key. Raises UserError if there is none."""
    if str(value) not in _OURS:
        raise UserError(f"{key}={quoted(value)}; use a model with one of {', '.join(_OURS)}")
    return _OURS[str(value)]


def write(name: str) -> str:
    """The name of our activation."""
    return _THEIRS[name]
