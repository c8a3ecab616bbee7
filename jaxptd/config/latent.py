"""The section `model.latent` of a config: multi-head latent attention.

Queries, keys and values of all heads are computed from small vectors of each token.
Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

import dataclasses
from typing import Any

from jaxptd.config.checks import Section, require_not_negative, require_positive
from jaxptd.errors import UserError, quoted
from jaxptd.fields import check_fields, named_fields

NAME = "model.latent"
EPSILON = 1e-6  # of the norms of latent vectors, in published code whatever model.norm_eps is

# What it has in place of options of other attention.
_WORDS = {
    "num_kv_heads": "as many heads of keys and values as of queries",
    "head_size": "the head size nope_size + rope_size",
    "qk_norm": "norms of latent vectors instead",
    "linear_bias": "no biases yet",
    "positions": "rotary positions",
    "products": "no 8-bit products yet",
}


@named_fields
@dataclasses.dataclass(frozen=True)
class Latent(Section):
    """Multi-head latent attention: heads are computed from a small latent vector of each token.

    Args:
        q_rank: elements of the latent vector of queries; 0 computes queries from the layer's input.
        kv_rank: elements of the latent vector of keys and values.
        nope_size: elements of a head of queries and keys without positions.
        rope_size: elements of a head of queries that are rotated, and of a key that all heads
            share; even.
        value_size: width of a head of values, nope_size + rope_size at most.
    """

    q_rank: int = 1536
    kv_rank: int = 512
    nope_size: int = 128
    rope_size: int = 64
    value_size: int = 128

    def __post_init__(self) -> None:
        check_fields(self, NAME)
        require_not_negative(NAME, self, "q_rank")
        require_positive(NAME, self, "kv_rank", "nope_size", "rope_size", "value_size")
        if self.rope_size % 2:
            raise UserError(
                f"{NAME}.rope_size={self.rope_size}: positions rotate pairs; use an even number"
            )
        if self.value_size > self.head_size:
            raise UserError(
                f"{NAME}.value_size={self.value_size}: attention takes values no wider than keys; "
                f"use {NAME}.nope_size + rope_size={self.head_size} or less"
            )

    @property
    def head_size(self) -> int:
        """Elements of a head of queries and keys."""
        return self.nope_size + self.rope_size

    @property
    def vector(self) -> int:
        """Elements of what keys and values of all heads are made of, with the rotated key."""
        return self.kv_rank + self.rope_size


def attended_sizes(model: Any, layout: Any) -> tuple[int, ...]:
    """Elements of a query and of a key in attention, for a `ModelConfig` and a `Layout`.

    One number, or several where layers differ.
    """
    if model.latent and layout.absorbs_latents:
        return (int(model.latent.vector),)
    return tuple(model.every_head_size)


def check_latent(model: Any) -> None:
    """Raises UserError for options that latent attention lacks; model: a `ModelConfig` with it."""
    plain = {
        "num_kv_heads": (None, model.num_heads),
        "head_size": (None,),
        "qk_norm": (None, False),
        "linear_bias": (None, "none"),
        "positions": (None, "rope"),
        "products": ("native",),
    }
    for name, allowed in plain.items():
        value = getattr(model, name)
        if value not in allowed:
            raise UserError(
                f"model.{name}={quoted(value)} with {NAME}: latent attention has "
                f"{_WORDS[name]}; leave it out"
            )
    if model.moe and model.moe.upcycle:
        raise UserError(
            f"model.moe.upcycle=true with {NAME}: no dense model has latent attention; leave "
            "upcycle out"
        )
