"""A family of models: all that steps, formulas and data need to know beside the model itself."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxptd.config import Config, ModelConfig, option, with_fields
from jaxptd.data import Data, Field, Objective, Tokenizer
from jaxptd.layout import Layout
from jaxptd.parts.architecture import Architecture

if TYPE_CHECKING:  # formulas read families without jax, which models import
    from jaxptd.models.model import Model


class Sequence(NamedTuple):
    """A sequence of tokens, or of rows of an image, that each sample has.

    Args:
        tokens: the field of a batch that is as long.
        documents: a batch -> the document of each token, below 0 for padding, or None where
            attention needs none.
    """

    tokens: str
    documents: Callable[[Mapping[str, Any]], Any] = lambda batch: None


class Loss(NamedTuple):
    """A term of the training loss: weight * (sum over targets) / (number of targets).

    Args:
        targets: the field of a batch whose entries of 0 or more are targets.
        weight: of the term.
        evaluated: whether evaluations have it; else it only guides the training.
        trained: whether it guides the training; else it is a score of evaluations.
    """

    targets: str
    weight: float = 1.0
    evaluated: bool = True
    trained: bool = True


class Writing(NamedTuple):
    """The way in which a model writes a text, a token at a time.

    Args:
        field: of a batch, with the tokens so far.
        first: (model, ids of a prompt) -> the first batch, int32[1, T] each; those that follow have
            the field's next token only.
        continues: whether the text continues the prompt; else it is an answer, with an end.
    """

    field: str
    first: Callable[[ModelConfig, Collection[int]], dict[str, np.ndarray]]
    continues: bool


class Work(NamedTuple):
    """The work of a sample in a training step: its tokens, or patches of an image, and FLOPs."""

    tokens: int
    flops: int


def with_a_layer_more(model: ModelConfig) -> ModelConfig:
    """The model with one layer more in each stack."""
    fields = {"num_layers": model.num_layers + 1}
    if model.encoder_decoder:
        fields["encoder_decoder.num_layers"] = model.decoder_layers + 1
    return with_fields(model, fields)


@dataclasses.dataclass(frozen=True)
class Family:
    """One row of `FAMILIES`.

    Args:
        make: the model's class; takes a `ModelConfig`, tensor_parallel, rngs, offload.
        fields: config -> the arrays of a batch, by name.
        losses: config -> the terms of the loss by name; perplexity is that of the first.
        rows: (samples, field, sample numbers[n], id of the token that ends a document) -> the
            field `[n, ..]`, a function of the numbers only.
        sequences: of a sample; the model makes each of the one before it.
        draw: (config, generator) -> a random batch, all fields that there can be, to compare
            layouts with.
        architecture: config -> its parts, from which bytes, memory and FLOPs are counted.
        last: names with which parameters behind the last stack begin.
        check: config -> None. Raises UserError if the family needs what the config does not set.
        special: names of tokens that its batches need beside the text's.
        objective: (config, tokenizer) -> what makes a batch of windows of the corpus; None: the
            next token.
        writing: how it writes a text; None: it does not.
        has_vocabulary: whether its batches have ids of a tokenizer.
        open: opens its data, where that is no text.
        classes: the field of a batch with the classes that `output` has logits of, all on each
            device; None: its output is of a vocabulary.
        sharing: (model, layout) -> devices that share the samples of a micro-batch, which is a
            multiple.
        work: model -> the work of a sample; None: that of its architecture.
        deeper: model -> the model with one layer more in each stack.
        has_times: whether the models of a step's time and of its peak on GPUs know its parts.
    """

    make: "Callable[..., Model]"
    fields: Callable[[Config], Mapping[str, Field]]
    losses: Callable[[ModelConfig], Mapping[str, Loss]]
    rows: Callable[..., np.ndarray]
    sequences: tuple[Sequence, ...]
    draw: Callable[[Config, np.random.Generator], dict[str, np.ndarray]]
    architecture: Callable[[ModelConfig], Architecture]
    last: tuple[str, ...]
    check: Callable[[Config], Any]
    special: tuple[str, ...] = ()
    objective: Callable[[Config, Tokenizer], Objective] | None = None
    writing: Writing | None = None
    has_vocabulary: bool = True
    open: Callable[[Config], Data] | None = None
    classes: str | None = None
    sharing: Callable[[ModelConfig, Layout], int] = lambda model, layout: 1
    work: Callable[[ModelConfig], Work] | None = None
    deeper: Callable[[ModelConfig], ModelConfig] = with_a_layer_more
    has_times: bool = True

    def has_documents(self, config: Config) -> bool:
        """True if attention keeps documents, or padding, apart."""
        return any(self.lengths_with_documents(config))

    def lengths_with_documents(self, config: Config) -> Iterator[int]:
        """Yields the length, as padded, of each sequence that has documents, or padding."""
        fields = self.fields(config)
        batch = dict.fromkeys(fields, 0)
        for each in self.sequences:
            length = fields[each.tokens].length
            if length and each.documents(batch) is not None:
                yield option(config.padded_model, length)

    def given(self, config: Config) -> Mapping[str, Field]:
        """The fields of a batch that do not follow from others."""
        return {name: x for name, x in self.fields(config).items() if x.derived is None}
