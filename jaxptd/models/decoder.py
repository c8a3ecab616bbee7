"""Decoder-only language models: their batches, losses and parts, for the families that they have.

Letters: B batch, T position, D model, F hidden, N heads, H head size, V vocabulary.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxptd.config import Config, ModelConfig
from jaxptd.data import NOT_COUNTED, Field, number_documents
from jaxptd.errors import UserError
from jaxptd.models.family import Family, Loss, Sequence, Writing
from jaxptd.parts.architecture import Architecture, Stack
from jaxptd.parts.attention import AttentionShape
from jaxptd.parts.ends import Head, Table
from jaxptd.parts.mlp import mlp_of
from jaxptd.parts.part import imported

CROSS_ENTROPY, Z_LOSS = "cross_entropy", "z_loss"  # terms of the loss
DOCUMENT_ENDS = 0.2  # share of random tokens after which a new document begins


def fields(config: Config) -> Mapping[str, Field]:
    """tokens, targets (below 0: not counted), and the number of each token's document.

    Documents are there where they are kept apart.
    """
    size = config.model.vocab_size
    shapes = {
        "tokens": Field("seq_length", lowest=0, end=size),
        "targets": Field("seq_length", end=size),
    }
    segments = {"segments": Field("seq_length")} if config.data.documents == "apart" else {}
    return shapes | segments


def losses(model: ModelConfig) -> Mapping[str, Loss]:
    """Cross-entropy of the next tokens, and what keeps their logits small."""
    z_loss = {Z_LOSS: Loss("targets", weight=model.z_loss, evaluated=False)}
    return {CROSS_ENTROPY: Loss("targets")} | (z_loss if model.z_loss else {})


def rows(samples: Any, field: str, number_B: np.ndarray, *, end_of_document: int) -> np.ndarray:
    """A field of samples by their numbers, int32[B, T]."""
    if field == "targets":
        targets: np.ndarray = samples.targets(number_B)
        return targets
    token_BT = samples.rows(number_B)[:, :-1]
    return number_documents(token_BT, end_of_document) if field == "segments" else token_BT


def documents(batch: Mapping[str, Any]) -> Any:
    """The number of each token's document, where they are kept apart."""
    return batch.get("segments")


def draw(config: Config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random tokens; the share of ignored targets differs from sequence to sequence."""
    shape = (config.train.global_batch_size, config.model.seq_length + 1)
    rows_BT = rng.integers(0, config.model.vocab_size, shape).astype(np.int32)
    targets = np.where(
        rng.random((shape[0], shape[1] - 1)) < rng.random((shape[0], 1)) / 2,
        NOT_COUNTED,
        rows_BT[:, 1:],
    )
    ends = rng.random(targets.shape) < DOCUMENT_ENDS
    batch = {"tokens": rows_BT[:, :-1], "targets": targets, "segments": ends.cumsum(1)}
    return {name: x.astype(np.int32) for name, x in batch.items()}


def first_batch(model: ModelConfig, prompt: Collection[int]) -> dict[str, np.ndarray]:
    """The text to continue."""
    return {"tokens": np.array([list(prompt)], np.int32)}


def architecture(model: ModelConfig) -> Architecture:
    """One stack of attention and MLP, between tables and a head."""
    options, hidden, size = model.block, model.hidden_size, model.vocab_size or 0
    statistics = 2 if options.norm == "layernorm" else 1
    post = options.norm_order == "post"
    parts = (AttentionShape.of(model), mlp_of(model))
    learned = options.positions == "learned"
    return Architecture(
        hidden,
        tokens=Table(size, hidden),
        embedded=(model.seq_length,),
        positions=Table(model.num_positions, hidden) if learned else None,
        stacks=(Stack("blocks", model.num_layers, parts, statistics, post),),
        heads=(Head(hidden, size, norm=0 if post else statistics, own=not model.tie_embeddings),),
        first_norm=statistics if post else 0,
        types=options.token_types,
    )


def check(config: Config) -> None:
    """Raises UserError without a vocabulary, or if a token sees its target."""
    if not config.model.block.causal:
        raise UserError(
            "model.causal=false: a decoder predicts the next token, and its tokens would see it; "
            "leave it out"
        )
    if types := config.model.block.token_types:
        raise UserError(
            f"model.token_types={types}: a decoder's batch has no types of tokens; leave it out"
        )
    require_vocabulary(config.model)


def require_vocabulary(model: ModelConfig) -> None:
    """Raises UserError without a number of token ids."""
    if model.vocab_size is None:
        raise UserError(
            "model.vocab_size=null: a program needs the number of token ids; set it, or use "
            "jaxptd.data.tokenizers.with_vocabulary(config)"
        )


DECODER = Family(
    make=imported("jaxptd.models.gpt", "GPT"),
    fields=fields,
    losses=losses,
    rows=rows,
    sequences=(Sequence("tokens", documents),),
    draw=draw,
    architecture=architecture,
    last=("norm", "head"),
    check=check,
    writing=Writing("tokens", first_batch, continues=True),
)
