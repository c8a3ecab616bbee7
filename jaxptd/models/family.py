"""A family of models: all that steps, formulas and data need to know beside the model itself."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxptd.config import Config, ModelConfig
from jaxptd.data import Objective, Tokenizer
from jaxptd.models.inventory import Inventory
from jaxptd.models.model import Model


class Field(NamedTuple):
    """An array of a batch: int32 `[B, T]`, or `[B]`; each process reads its own part of it.

    Args:
        length: the field of `ModelConfig` that is T; None: a number a sequence.
        lowest: the lowest value; None: any.
        end: values are below it; None: any.
    """

    length: str | None
    lowest: int | None = None
    end: int | None = None


class Loss(NamedTuple):
    """A term of the training loss: weight * (sum over targets) / (number of targets).

    Args:
        targets: the field of a batch whose entries of 0 or more are targets.
        weight: of the term.
        evaluated: whether evaluations have it; else it only guides the training.
    """

    targets: str
    weight: float = 1.0
    evaluated: bool = True


@dataclasses.dataclass(frozen=True)
class Family:
    """One row of `FAMILIES`.

    Args:
        make: the model's class; takes a `ModelConfig`, form, rngs, offload.
        fields: config -> the arrays of a batch, by name.
        losses: config -> the terms of the loss by name; perplexity is that of the first.
        rows: (samples, field, sample numbers[n], id of the token that ends a document) -> int32
            `[n, T]`, a function of the numbers only.
        documents: a batch -> the document of each token, below 0 for padding, or None where
            attention needs none.
        draw: (config, generator) -> a random batch, all fields that there can be, to compare
            layouts with.
        inventory: config -> its parts, from which bytes, memory and FLOPs are counted.
        last: names with which parameters behind the last stack begin.
        check: config -> None. Raises UserError if the family needs what the config does not set.
        special: names of tokens that its batches need beside the text's.
        objective: (config, tokenizer) -> what makes a batch of windows of the corpus; None: the
            next token.
        writes: whether it continues a text.
    """

    make: Callable[..., Model]
    fields: Callable[[Config], Mapping[str, Field]]
    losses: Callable[[ModelConfig], Mapping[str, Loss]]
    rows: Callable[..., np.ndarray]
    documents: Callable[[Mapping[str, Any]], Any]
    draw: Callable[[Config, np.random.Generator], dict[str, np.ndarray]]
    inventory: Callable[[ModelConfig], Inventory]
    last: tuple[str, ...]
    check: Callable[[Config], Any]
    special: tuple[str, ...] = ()
    objective: Callable[[Config, Tokenizer], Objective] | None = None
    writes: bool = True

    def has_documents(self, config: Config) -> bool:
        """True if attention keeps documents, or padding, apart."""
        return self.documents(dict.fromkeys(self.fields(config), 0)) is not None
