"""A family of models: all that steps, formulas and data need to know besides the model."""

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
    """A sequence of tokens, or of rows of an image, in each sample.

    Args:
        tokens: a field of the batch with this length.
        documents: a batch -> the document of each token, below 0 for padding, or None where
            attention needs no documents.
    """

    tokens: str
    documents: Callable[[Mapping[str, Any]], Any] = lambda batch: None


class Loss(NamedTuple):
    """A term of the training loss: weight * (sum over targets) / (number of targets).

    Args:
        targets: the field of a batch whose entries >= 0 are targets.
        weight: the term's factor.
        evaluated: whether evaluations report it; otherwise it only guides training.
        trained: whether it guides training; otherwise it is a score of evaluations.
        optional: whether a batch may have none of these targets; the term is 0 then.
    """

    targets: str
    weight: float = 1.0
    evaluated: bool = True
    trained: bool = True
    optional: bool = False


class Writing(NamedTuple):
    """The way a model generates text, one token at a time.

    Args:
        field: the field of a batch with the tokens so far.
        first: (model, ids of a prompt) -> the first batch, int32[1, T] each; later ones hold only
            the field's next token.
        continues: whether the text continues the prompt; otherwise it is an answer with an end.
    """

    field: str
    first: Callable[[ModelConfig, Collection[int]], dict[str, np.ndarray]]
    continues: bool


class Work(NamedTuple):
    """A sample's work in a training step: tokens, or patches of an image, and FLOPs."""

    tokens: int
    flops: int


def with_a_layer_more(model: ModelConfig) -> ModelConfig:
    """The model with one more layer in each stack, or one more period of layers."""
    fields: dict[str, Any] = {"num_layers": model.num_layers + model.period}
    if model.encoder_decoder:
        fields["encoder_decoder.num_layers"] = model.decoder_layers + 1
    return with_fields(model, fields)


@dataclasses.dataclass(frozen=True)
class Family:
    """One row of `FAMILIES`.

    Args:
        make: the model's class; takes a `ModelConfig`, tensor_parallel, rngs, offload.
        fields: config -> the arrays of a batch, by name.
        losses: config -> the terms of the loss by name; the first one gives the perplexity.
        rows: (samples, field, sample numbers[n], id of the token that ends a document) -> the field
            `[n, ..]`, which depends on the numbers only.
        sequences: the sequences of a sample; the model computes each from the previous one.
        draw: (config, generator) -> a random batch with all possible fields, for comparing layouts.
        architecture: config -> its parts, from which bytes, memory and FLOPs are counted.
        last: prefixes of the names of parameters after the last stack.
        check: config -> None. Raises UserError if the config does not suit the family.
        special: names of tokens that its batches need besides the text's.
        objective: (config, tokenizer) -> a function from windows of the corpus to a batch; None:
            predict the next token.
        writing: how it generates text; None: it cannot.
        has_vocabulary: whether its batches hold ids of a tokenizer.
        open: opens its data, if not text.
        classes: the field of a batch with the classes to which `output`'s logits refer, all on each
            device; None: they refer to a vocabulary.
        sharing: (model, layout) -> the number of devices that share a micro-batch's samples; it
            divides their number.
        work: model -> the work of a sample; None: take it from the architecture.
        deeper: model -> the model with one more layer in each stack.
        has_times: whether the models of step time and peak memory on GPUs cover its parts.
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
        """True if attention is masked by document or padding."""
        return any(self.lengths_with_documents(config))

    def lengths_with_documents(self, config: Config) -> Iterator[int]:
        """Yields the padded length of each sequence with documents or padding."""
        fields = self.fields(config)
        batch = dict.fromkeys(fields, 0)
        for each in self.sequences:
            length = fields[each.tokens].length
            if length and each.documents(batch) is not None:
                yield option(config.padded_model, length)

    def given(self, config: Config) -> Mapping[str, Field]:
        """The fields of a batch that are not derived from others."""
        return {name: x for name, x in self.fields(config).items() if x.derived is None}
