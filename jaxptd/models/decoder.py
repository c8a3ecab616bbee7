"""Decoder-only language models: batches, losses and parts of their families.

Letters: B batch, T position, D model, F hidden, N heads, H head size, V vocabulary.
"""

import itertools
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np

from jaxptd.config import Config, ModelConfig
from jaxptd.config.preference import ACCURACY, CHOSEN, LOSS, REJECTED, most_pairs
from jaxptd.context_parallel import Imported
from jaxptd.data import NOT_COUNTED, Derived, Field, document_starts
from jaxptd.errors import UserError
from jaxptd.layout import Layout
from jaxptd.models.family import Family, Loss, Sequence, Writing
from jaxptd.parts.architecture import Architecture, Stack
from jaxptd.parts.ends import Embedding, End, Head, PairSums
from jaxptd.parts.latent_attention import attention_of
from jaxptd.parts.mlp import mlp_of
from jaxptd.parts.moe import MoEShape, RouterLosses
from jaxptd.parts.mtp import Module

CROSS_ENTROPY, Z_LOSS = "cross_entropy", "z_loss"  # terms of the loss
CHOICES = "choices"  # the field of given experts
SEGMENTS = "segments"  # the field of documents
SAMPLE, POSITION = "sample", "position"  # fields that say where `layout.balance` put what
IN_DOCUMENT = "position_in_document"
REFERENCE = "reference"  # the field of the reference model's log-probabilities
PAIRS = "pairs"  # the field that numbers pairs of answers
BALANCE_LOSS, ROUTER_Z_LOSS = "balance_loss", "router_z_loss"
MTP_LOSS = "mtp_loss"  # of the first MTP module; of others with their numbers
DOCUMENT_ENDS = 0.2  # share of random tokens after which a new document begins


def fields(config: Config) -> Mapping[str, Field]:
    """Fields tokens, targets (below 0: ignored), and the number of each token's document.

    Documents only where attention is masked by them; positions in them where they are read.
    """
    size = config.model.vocab_size
    shapes = {
        "tokens": Field("seq_length", lowest=0, end=size),
        "targets": Field("seq_length", end=size),
    }
    segments = {SEGMENTS: Field("seq_length")} if config.data.apart else {}
    if config.restarts_positions:
        segments[IN_DOCUMENT] = Field(
            "seq_length", lowest=0, derived=Derived((SEGMENTS,), _in_documents)
        )
    of_pairs = pair_fields(config.model) if config.model.preference else {}
    arrangement = arranged(config.layout)
    return shapes | segments | of_pairs | choices(config.model) | arrangement | fields_ahead(config)


def arranged(layout: Layout) -> dict[str, Field]:
    """The number of each sample in the global batch, and each token's position in its sequence.

    Only where samples, or tokens, are arranged so that devices have equal work.
    """
    made = {}
    if layout.balance != "none":
        made[SAMPLE] = Field(None, lowest=0, derived=Derived((), _as_given))
    if layout.places_tokens:
        made[POSITION] = Field("seq_length", lowest=0, derived=Derived((SEGMENTS,), _in_a_row))
    return made


def _as_given(number_B: np.ndarray) -> np.ndarray:
    return number_B.astype(np.int32)


def _in_a_row(segment_BT: np.ndarray) -> np.ndarray:
    position_T = np.arange(segment_BT.shape[1], dtype=np.int32)
    return np.broadcast_to(position_T, segment_BT.shape)


def fields_ahead(config: Config) -> dict[str, Field]:
    """For each MTP module k the tokens k ahead, which it reads, and the targets behind these.

    They follow from the given fields. A module has no target where the sequence, or with documents
    apart the document, has no token k ahead.
    """
    size, found, apart = config.model.vocab_size, {}, [SEGMENTS] * config.data.apart
    for k in range(1, config.model.ahead + 1):
        tokens = Derived(("tokens", *apart), partial(tokens_ahead, k))
        targets = Derived(("targets", *apart), partial(targets_ahead, k))
        found[f"tokens_{k}"] = Field("seq_length", lowest=0, end=size, derived=tokens)
        found[f"targets_{k}"] = Field("seq_length", end=size, derived=targets)
    return found


def tokens_ahead(k: int, token_BT: np.ndarray, segment_BT: np.ndarray | None = None) -> np.ndarray:
    """The token k ahead of each; 0 where there is none in its document."""
    return _in_its_document(k, shifted(token_BT, k, 0), segment_BT, fill=0)


def targets_ahead(
    k: int, target_BT: np.ndarray, segment_BT: np.ndarray | None = None
) -> np.ndarray:
    """The target of the token k ahead of each; not counted where there is none in its document."""
    return _in_its_document(k, shifted(target_BT, k, NOT_COUNTED), segment_BT, fill=NOT_COUNTED)


def _in_its_document(
    k: int, ahead_BT: np.ndarray, segment_BT: np.ndarray | None, *, fill: int
) -> np.ndarray:
    """Fills in where what is k ahead of a token is of another document."""
    if segment_BT is None:
        return ahead_BT
    alike_BT = shifted(segment_BT, k, NOT_COUNTED) == segment_BT
    return np.where(alike_BT, ahead_BT, np.int32(fill))


def shifted(x_BT: np.ndarray, k: int, fill: int) -> np.ndarray:
    """Each entry is the one k behind it."""
    return np.pad(x_BT[:, k:], ((0, 0), (0, k)), constant_values=fill)


def choices(model: ModelConfig) -> dict[str, Field]:
    """The field of given experts `[B, T, L, K]`, if routers read one; below 0: they choose."""
    if not (model.moe and model.moe.replay):
        return {}
    sizes = ("routed_layers", "moe.top_k")
    return {CHOICES: Field("seq_length", end=model.moe.num_experts, others=sizes)}


def _in_documents(segment_BT: np.ndarray) -> np.ndarray:
    position_BT: np.ndarray = np.arange(segment_BT.shape[1]) - document_starts(segment_BT)
    return position_BT.astype(np.int32)


def losses(model: ModelConfig) -> Mapping[str, Loss]:
    """Cross-entropy of the next tokens, z-loss, which keeps their logits small, routers' losses,
    and the cross-entropy of tokens further ahead. With `model.preference` that of pairs replaces
    the first two.
    """
    if model.preference:
        return {**pair_losses(), **router_losses(model)}
    z_loss = {Z_LOSS: Loss("targets", weight=model.z_loss, evaluated=False)}
    of_logits = {CROSS_ENTROPY: Loss("targets")} | (z_loss if model.z_loss else {})
    return of_logits | router_losses(model) | losses_ahead(model)


def losses_ahead(model: ModelConfig) -> dict[str, Loss]:
    """The cross-entropy of each MTP module, with an equal share of `model.mtp.weight`."""
    if model.mtp is None:
        return {}
    share: Any = {"weight": model.mtp.weight / model.ahead, "evaluated": False, "optional": True}
    return {
        MTP_LOSS if k == 1 else f"{MTP_LOSS}_{k}": Loss(f"targets_{k}", **share)
        for k in range(1, model.ahead + 1)
    }


def rows(samples: Any, field: str, number_B: np.ndarray, *, end_of_document: int) -> np.ndarray:
    """A field of the samples with these numbers, `[B, T]`."""
    if field == "targets":
        found: np.ndarray = samples.targets(number_B)
    elif field == SEGMENTS:
        found = samples.documents(number_B, end_of_document)
    elif field == REFERENCE:
        found = samples.reference(number_B)
    else:
        found = samples.rows(number_B)[:, :-1]
    return found


def documents(batch: Mapping[str, Any]) -> Any:
    """The number of each token's document, where attention is masked by it."""
    return batch.get(SEGMENTS)


def draw(config: Config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random tokens; the share of ignored targets differs from sequence to sequence.

    Sequences of whole documents end with padding of up to half of them.
    """
    shape = (config.train.global_batch_size, config.model.seq_length + 1)
    rows_BT = rng.integers(0, config.model.vocab_size, shape).astype(np.int32)
    targets = np.where(
        rng.random((shape[0], shape[1] - 1)) < rng.random((shape[0], 1)) / 2,
        NOT_COUNTED,
        rows_BT[:, 1:],
    )
    segments = (rng.random(targets.shape) < DOCUMENT_ENDS).cumsum(1)
    if config.data.documents == "whole":
        place_T = np.arange(1, shape[1])
        padding_BT = place_T > shape[1] * (1 - rng.random((shape[0], 1)) / 2)
        segments, targets = (np.where(padding_BT, NOT_COUNTED, x) for x in (segments, targets))
    of_pairs = drawn_pairs(segments, rng) if config.model.preference else {}
    batch = {"tokens": rows_BT[:, :-1], "targets": targets, SEGMENTS: segments, **of_pairs}
    if moe := config.model.moe:
        shape = (*targets.shape, config.model.routed_layers, moe.top_k)
        batch[CHOICES] = np.full(shape, NOT_COUNTED)
    return {name: x if name == REFERENCE else x.astype(np.int32) for name, x in batch.items()}


def first_batch(model: ModelConfig, prompt: Collection[int]) -> dict[str, np.ndarray]:
    """The text to continue."""
    return {"tokens": np.array([list(prompt)], np.int32)}


def architecture(model: ModelConfig) -> Architecture:
    """Attention and MLP, or experts, between an embedding and a head."""
    options, hidden, size = model.block, model.hidden_size, model.vocab_size or 0
    statistics = 2 if options.norm == "layernorm" else 1
    post = options.norm_order == "post"
    learned = options.positions == "learned"
    embedding = Embedding(
        hidden,
        size,
        (model.seq_length,),
        positions=model.num_positions if learned else 0,
        types=options.token_types,
        statistics=statistics if post else 0,
    )
    own = not model.tie_embeddings
    head = Head(hidden, size, statistics=0 if post else statistics, own=own)
    terms = len(router_losses(model))
    behind: tuple[End, ...] = (head, RouterLosses(terms)) if terms else (head,)
    behind += (PairSums(),) if model.preference else ()
    modules = [Module(layer, size) for layer in layers_ahead(model, statistics)]
    return Architecture(hidden, (embedding,), stacks(model, statistics), (*behind, *modules))


def stacks(model: ModelConfig, statistics: int) -> tuple[Stack, ...]:
    """Runs of layers of the same kind: `blocks`, or `blocks_3` for the run from layer 3 on.

    statistics: as in `Stack`.
    """
    moe = model.moe
    kinds = [bool(moe and moe.is_sparse(layer)) for layer in range(model.num_layers)]
    runs = [(kind, len([*layers])) for kind, layers in itertools.groupby(kinds)]
    made, first = [], 0
    for sparse, layers in runs:
        name = "blocks" if len(runs) == 1 else f"blocks_{first}"
        own = slice(first, first + layers)
        made.append(_stack(model, name, own, statistics=statistics, sparse=sparse))
        first += layers
    return tuple(made)


def layers_ahead(model: ModelConfig, statistics: int) -> list[Stack]:
    """The layer of each MTP module, as a stack of one: they are like the last layer."""
    last = model.num_layers - 1
    sparse = bool(model.moe and model.moe.is_sparse(last))
    return [
        _stack(model, f"mtp_{k}", slice(last, last + 1), statistics=statistics, sparse=sparse)
        for k in range(1, model.ahead + 1)
    ]


def _stack(model: ModelConfig, name: str, layers: slice, *, statistics: int, sparse: bool) -> Stack:
    """Layers of one kind; sparse: whether they have experts."""
    number = layers.stop - layers.start
    period = min(model.period, number)
    parts = [
        (attention_of(model, each), MoEShape.of(model) if sparse else mlp_of(model))
        for first in range(layers.start, layers.start + period)
        for each in [slice(first, layers.stop, period)]
    ]
    every, order = tuple(itertools.chain(*parts)), model.block.norm_order
    return Stack(name, number // period, every, statistics, order, updates="x", period=period)


# ---- pairs of answers ----------------------------------------------------------------------------


def pair_fields(model: ModelConfig) -> dict[str, Field]:
    """The reference's log-probabilities, of which a document's sum counts, and pairs' numbers."""
    exact = model.dtype == "float64"
    wide: Literal["float32", "float64"] = "float64" if exact else "float32"
    return {
        REFERENCE: Field("seq_length", dtype=wide),
        PAIRS: Field("seq_length", derived=Derived(("targets", SEGMENTS), pair_numbers)),
    }


def pair_numbers(target_BT: np.ndarray, segment_BT: np.ndarray) -> np.ndarray:
    """The number of a pair at the first target of its chosen text; elsewhere not counted."""
    chosen_BT = (target_BT >= 0) & (segment_BT >= 0) & (segment_BT % 2 == 0)
    document_BT = np.where(chosen_BT, segment_BT, NOT_COUNTED)
    last_BT = np.maximum.accumulate(document_BT, axis=1)
    before_BT = np.pad(last_BT[:, :-1], ((0, 0), (1, 0)), constant_values=NOT_COUNTED)
    return np.where(document_BT > before_BT, segment_BT // 2, NOT_COUNTED).astype(np.int32)


def pair_losses() -> Mapping[str, Loss]:
    """The loss, the share of pairs whose chosen text gains more, and what both gain, times beta."""
    score = Loss(PAIRS, weight=0.0, trained=False)
    return {LOSS: Loss(PAIRS), ACCURACY: score, CHOSEN: score, REJECTED: score}


def drawn_pairs(segment_BT: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random log-probabilities, and documents of at most as many pairs as a sequence can hold."""
    most = 2 * most_pairs(segment_BT.shape[1])
    reference_BT = -np.abs(rng.standard_normal(segment_BT.shape))
    return {REFERENCE: reference_BT, SEGMENTS: np.minimum(segment_BT, most - 1)}


# ---- the family ----------------------------------------------------------------------------------


def router_losses(model: ModelConfig) -> dict[str, Loss]:
    """The terms that routers add to the loss, in the order of their columns."""
    weights = {}
    if model.moe:
        weights = {BALANCE_LOSS: model.moe.balance_loss, ROUTER_Z_LOSS: model.moe.z_loss}
    return {
        name: Loss("targets", weight=weight, evaluated=False)
        for name, weight in weights.items()
        if weight
    }


def check(config: Config) -> None:
    """Raises UserError if the vocabulary's size is not set, or a token sees its target."""
    if not config.model.block.causal:
        raise UserError(
            "model.causal=false: a decoder predicts the next token, which its tokens would see; "
            "leave it out"
        )
    if types := config.model.block.token_types:
        raise UserError(
            f"model.token_types={types}: a decoder's batch has no token types; leave it out"
        )
    require_vocabulary(config.model)


def require_vocabulary(model: ModelConfig) -> None:
    """Raises UserError if the number of token ids is not set."""
    if model.vocab_size is None:
        raise UserError(
            "model.vocab_size=null: a program needs the number of token ids; set it, or use "
            "jaxptd.data.tokenizers.with_vocabulary(config)"
        )


DECODER = Family(
    make=Imported("jaxptd.models.gpt", "GPT"),
    fields=fields,
    losses=losses,
    rows=rows,
    sequences=(Sequence("tokens", documents),),
    draw=draw,
    architecture=architecture,
    last=("norm", "head", "mtp"),
    check=check,
    writing=Writing("tokens", first_batch, continues=True),
)
