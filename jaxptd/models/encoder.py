"""Encoders: batches, losses and parts of their families.

Letters: B batch, T position, D model, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxptd.config import Config, ModelConfig
from jaxptd.config.block import OF_GATES
from jaxptd.context_parallel import Imported
from jaxptd.data import NOT_COUNTED, Field, Objective, Tokenizer
from jaxptd.data.objectives import MASK_TOKENS, MaskedPairs, MaskIds
from jaxptd.errors import UserError
from jaxptd.models import decoder
from jaxptd.models.family import Family, Loss, Sequence
from jaxptd.parts.architecture import Architecture
from jaxptd.parts.ends import Head

MLM, NSP = "mlm", "nsp"  # terms of the loss: masked tokens, next sentences
CLASSES = 2  # classes of a pair: 0, B follows A; 1, it does not
MASKED = 0.15  # share of random tokens that are targets


def fields(config: Config) -> Mapping[str, Field]:
    """Fields tokens, token_types, mask (1: token, 0: padding), targets; next_sentence per sequence.

    Targets and next_sentence below 0 are ignored.
    """
    model = config.model
    return {
        "tokens": Field("seq_length", lowest=0, end=model.vocab_size),
        "token_types": Field("seq_length", lowest=0, end=model.block.token_types),
        "mask": Field("seq_length", lowest=0, end=2),
        "targets": Field("seq_length", end=model.vocab_size),
        "next_sentence": Field(None, end=CLASSES),
    }


def losses(model: ModelConfig) -> Mapping[str, Loss]:
    """Cross-entropy of masked tokens and of sentence pairs, each averaged over its own count."""
    return {MLM: Loss("targets"), NSP: Loss("next_sentence")}


def documents(batch: Mapping[str, Any]) -> Any:
    """0 for tokens, -1 for padding, which no token sees."""
    return batch["mask"] - 1


def draw(config: Config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random pairs, padded at the end."""
    B, T = config.train.global_batch_size, config.model.seq_length
    length_B1 = rng.integers(T // 2 + 1, T + 1, (B, 1))
    first_B1 = rng.integers(1, length_B1)
    position_T, size = np.arange(T), config.model.vocab_size or 0
    mask_BT = position_T < length_B1
    masked_BT = mask_BT & (rng.random((B, T)) < MASKED)
    masked_BT[:, 1] = True  # at least one
    ids_BT = rng.integers(0, size, (B, T))
    batch = {
        "tokens": rng.integers(0, size, (B, T)),
        "token_types": position_T >= first_B1,
        "mask": mask_BT,
        "targets": np.where(masked_BT, ids_BT, NOT_COUNTED),
        "next_sentence": rng.integers(0, CLASSES, B),
    }
    return {name: x.astype(np.int32) for name, x in batch.items()}


def architecture(model: ModelConfig) -> Architecture:
    """A decoder's parts, but with attention to all tokens and two heads."""
    decoder_parts, size = decoder.architecture(model), model.hidden_size
    (stack,) = decoder_parts.stacks
    heads = (
        Head(size, model.vocab_size or 0, squares=1, statistics=stack.statistics, bias=True),
        Head(size, CLASSES, squares=1, own=True, bias=True, of_tokens=False, name="head1"),
    )
    return dataclasses.replace(decoder_parts, behind=heads)


def rows(samples: Any, field: str, number_B: np.ndarray, **_: Any) -> np.ndarray:
    """A field of the prepared samples with these numbers, int32[B, T] or [B]."""
    values: np.ndarray = samples.field(field, number_B)
    return values


def check(config: Config) -> None:
    """Raises UserError for settings that encoders do not support."""
    model = config.model
    decoder.require_vocabulary(model)
    for name, value in (("norm_order", "post"), ("causal", False), ("token_types", 2)):
        if (given := getattr(model.block, name)) != value:
            raise UserError(
                f"model.{name}={given}: an encoder of pairs of sentences has {value}; leave it out"
            )
    if model.block.activation in OF_GATES:
        raise UserError(
            f"model.activation={model.block.activation}: the head of an encoder has an activation "
            "without a gate; use another activation"
        )
    for name, unset in (
        ("logit_softcap", None),
        ("logit_divisor", None),
        ("z_loss", 0.0),
        ("tie_embeddings", True),
    ):
        if (given := getattr(model, name)) != unset:
            raise UserError(f"model.{name}={given}: an encoder has no such head; leave it out")
    if config.data.apart:
        raise UserError(
            f"data.documents={config.data.documents} has no effect with the family bert, whose "
            "samples are pairs of sentences; leave it out"
        )


def objective(config: Config, tokenizer: Tokenizer) -> Objective:
    """Makes masked pairs of sentences."""
    return MaskedPairs(MaskIds.of(tokenizer), config.model.seq_length)


ENCODER = Family(
    make=Imported("jaxptd.models.bert", "BERT"),
    fields=fields,
    losses=losses,
    rows=rows,
    sequences=(Sequence("tokens", documents),),
    draw=draw,
    architecture=architecture,
    last=("transform", "bias", "pooler", "pairs"),
    check=check,
    special=MASK_TOKENS,
    objective=objective,
)
