"""Encoder-decoders: batches, losses and parts of their families.

Letters: B batch, S tokens of a source, T tokens of its targets.
"""

import dataclasses
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxptd.config import Config, EncoderDecoder, ModelConfig
from jaxptd.context_parallel import Imported
from jaxptd.data import NOT_COUNTED, Derived, Field, Objective, Tokenizer
from jaxptd.data.objectives import SPAN_TOKENS, SpanCorruption, SpanIds
from jaxptd.errors import UserError
from jaxptd.models import decoder, encoder
from jaxptd.models.family import Family, Sequence, Writing
from jaxptd.parts.architecture import Architecture, Stack
from jaxptd.parts.attention import AttentionShape
from jaxptd.parts.cross_attention import CrossAttentionShape
from jaxptd.parts.ends import Embedding
from jaxptd.parts.mlp import mlp_of


def section_of(model: ModelConfig) -> EncoderDecoder:
    """The config section of an encoder-decoder."""
    assert model.encoder_decoder is not None
    return model.encoder_decoder


def fields(config: Config) -> Mapping[str, Field]:
    """Fields source, source_mask (1: token, 0: padding), targets, and the decoder's inputs.

    Targets below 0 are ignored.
    """
    model = config.model
    size, shift = model.vocab_size, partial(shifted_right, start=section_of(model).start_token)
    return {
        "source": Field("seq_length", lowest=0, end=size),
        "source_mask": Field("seq_length", lowest=0, end=2),
        "targets": Field("encoder_decoder.seq_length", end=size),
        "inputs": Field("encoder_decoder.seq_length", derived=Derived(("targets",), shift)),
    }


def shifted_right(targets_BT: np.ndarray, *, start: int) -> np.ndarray:
    """The decoder's inputs: the token before each target, and the start token before the first.

    The start token also replaces ignored targets.
    """
    before_BT = np.pad(targets_BT, ((0, 0), (1, 0)), constant_values=start)[:, :-1]
    return np.where(before_BT < 0, np.int32(start), before_BT)


def documents(batch: Mapping[str, Any]) -> Any:
    """0 for tokens of the source, -1 for padding, which no token sees."""
    return batch["source_mask"] - 1


def draw(config: Config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random sources and targets, padded at the end."""
    B, model = config.train.global_batch_size, config.model
    S, T, size = model.seq_length, model.target_length, model.vocab_size or 0
    source_B1, target_B1 = (rng.integers(n // 2 + 1, n + 1, (B, 1)) for n in (S, T))
    counted_BT = np.arange(T) < target_B1
    batch = {
        "source": rng.integers(0, size, (B, S)),
        "source_mask": np.arange(S) < source_B1,
        "targets": np.where(counted_BT, rng.integers(0, size, (B, T)), NOT_COUNTED),
    }
    return {name: x.astype(np.int32) for name, x in batch.items()}


def first_batch(model: ModelConfig, prompt: Collection[int]) -> dict[str, np.ndarray]:
    """The prompt as a padded source, and the start token as the decoder's input.

    Raises:
        UserError: the prompt is too long.
    """
    length, S = len(prompt), model.seq_length
    if length > S:
        raise UserError(
            f"the prompt has {length} tokens, with its end, and a source model.seq_length={S}; use "
            "a shorter one"
        )
    padded, mask_S = np.zeros(S, np.int32), np.arange(S) < length
    padded[:length] = list(prompt)
    start = np.array([[section_of(model).start_token]], np.int32)
    return {"source": padded[None], "source_mask": mask_S[None].astype(np.int32), "inputs": start}


def architecture(model: ModelConfig) -> Architecture:
    """Two stacks between a table of tokens and a decoder's head."""
    decoder_parts = decoder.architecture(model)
    (stack,) = decoder_parts.stacks
    length, targets_length = model.seq_length, model.target_length
    of_targets: dict[str, Any] = {"tokens": targets_length, "reaches": (targets_length,)}
    source = AttentionShape.of(model, causal=False)
    targets = AttentionShape.of(model, causal=True, **of_targets)
    cross = CrossAttentionShape.of(
        model,
        tokens=targets_length,
        reaches=(length,),
        causal=False,
        buckets=0,
        source=length,
        source_statistics=stack.statistics,
    )
    mlp = mlp_of(model)
    stacks = (
        dataclasses.replace(stack, name="encoder", parts=(source, mlp)),
        Stack(
            name="decoder",
            layers=model.decoder_layers,
            parts=(targets, cross, mlp),
            statistics=stack.statistics,
        ),
    )
    embedding = Embedding(
        model.hidden_size, model.vocab_size or 0, lengths=(length, targets_length)
    )
    return dataclasses.replace(decoder_parts, before=(embedding,), stacks=stacks)


def check(config: Config) -> None:
    """Raises UserError for settings that encoder-decoders do not support."""
    model = config.model
    decoder.require_vocabulary(model)
    for name, value in (("positions", "relative"), ("norm_order", "pre"), ("token_types", 0)):
        if (given := getattr(model.block, name)) != value:
            raise UserError(f"model.{name}={given}: an encoder-decoder has {value}; leave it out")
    if model.logit_divisor is not None:
        raise UserError(
            f"model.logit_divisor={model.logit_divisor} has no effect with the family "
            f"{model.family}; use model.encoder_decoder.output_scale instead"
        )
    if model.neftune:
        raise UserError(
            f"model.neftune={model.neftune}: embeddings of an encoder-decoder have no noise; leave "
            "it out"
        )
    for name in ("causal", "window"):
        if (given := getattr(model, name)) is not None:
            raise UserError(
                f"model.{name}={given}: an encoder attends to all tokens, a decoder to all "
                "earlier ones; leave it out"
            )
    if (start := section_of(model).start_token) >= (model.vocab_size or 0):
        raise UserError(
            f"model.encoder_decoder.start_token={start} is not below model.vocab_size="
            f"{model.vocab_size}; use the id of padding, or 0"
        )
    if config.data.apart:
        raise UserError(
            f"data.documents={config.data.documents} has no effect with the family {model.family}, "
            "whose samples are windows with spans cut out; leave it out"
        )


def objective(config: Config, tokenizer: Tokenizer) -> Objective:
    """Makes sources with spans cut out, and these spans as targets."""
    model = config.model
    return SpanCorruption(SpanIds.of(tokenizer), model.seq_length, model.target_length)


ENCODER_DECODER = Family(
    make=Imported("jaxptd.models.t5", "T5"),
    fields=fields,
    losses=decoder.losses,
    rows=encoder.rows,
    sequences=(Sequence("source", documents), Sequence("inputs")),
    draw=draw,
    architecture=architecture,
    last=("norm", "head"),
    check=check,
    special=SPAN_TOKENS,
    objective=objective,
    writing=Writing("inputs", first_batch, continues=False),
)
