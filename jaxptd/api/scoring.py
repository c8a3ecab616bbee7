"""The log-likelihood of texts, for many texts of any length.

Texts are padded to few lengths, so that few programs are compiled; padding follows a text, whose
logits do not depend on it. Texts of a length are computed together, and shared by the replicas.

Letters: B texts, T position, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxptd.api.whole_batches import sharded_logits, tokens_field
from jaxptd.collectives import all_gather, as_same
from jaxptd.errors import UserError
from jaxptd.mesh import Axis
from jaxptd.params import Params
from jaxptd.step import Program

SHORTEST = 32  # tokens that a text is padded to at least
AT_ONCE = 4096  # tokens that a replica computes together, if the model is not longer


class Question(NamedTuple):
    """Ids that are given, one at least, and those whose likelihood is asked for."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """The log-likelihood of a continuation, in nats; greedy: each of its ids is the likeliest."""

    log_likelihood: float
    greedy: bool


class Scorer:
    """Compiled functions of a program that score texts.

    Args:
        program: of a model that continues a text, on any layout.

    Raises:
        UserError: the model continues no text.
    """

    def __init__(self, program: Program) -> None:
        config = program.config
        if tokens_field(config) is None:
            raise UserError(
                f"model.family={config.model.family} does not continue a text, and has no "
                "likelihoods of one; use a decoder, as gpt or llama"
            )
        self._program, self._score = program, _score_function(program)

    def __call__(self, params: Params, questions: Sequence[Question]) -> list[Score]:
        """Scores continuations, in the order of the questions.

        A text longer than the model loses its first tokens.

        Raises:
            UserError: a continuation is longer than the model.
        """
        scores = [Score(0.0, True)] * len(questions)
        longest, replicas = self._program.config.model.seq_length, self._program.config.layout.dp
        for length, numbers in _by_length(questions, longest).items():
            rows = max(1, AT_ONCE // length) * replicas
            for first in range(0, len(numbers), rows):
                batch = numbers[first : first + rows]
                texts = np.array([_row(questions[number], length) for number in batch])
                padded = np.pad(texts, ((0, rows - len(batch)), (0, 0), (0, 0)), mode="edge")
                sums_B, greedy_B = self._score(params, padded[:, 0], padded[:, 1])
                for number, total, likeliest in zip(batch, sums_B, greedy_B, strict=False):
                    scores[number] = Score(float(total), bool(likeliest))
        return scores


def windows(ids: Sequence[int], begin: int, length: int) -> Iterator[Question]:
    """Splits a document into questions that ask for each of its ids once.

    All but the last ask for `length` ids, after one id that is known; the last has as long a text
    as the model takes.

    Args:
        ids: of the document.
        begin: the id before it.
        length: of the model.
    """
    known = [begin, *ids]
    for first in range(0, len(ids), length):
        last = min(first + length, len(ids))
        start = max(0, last - length)
        yield Question(known[start : first + 1], ids[first:last])


def _by_length(questions: Sequence[Question], longest: int) -> dict[int, list[int]]:
    """The numbers of questions, by the length that their texts are padded to."""
    numbers: dict[int, list[int]] = {}
    for number, (context, continuation) in enumerate(questions):
        if len(continuation) > longest:
            raise UserError(
                f"a continuation has {len(continuation)} tokens, the model takes {longest}; split "
                "it, or use a model with a larger seq_length"
            )
        if continuation:
            need = min(len(context) + len(continuation) - 1, longest)
            length = min(max(SHORTEST, 1 << (need - 1).bit_length()), longest)
            numbers.setdefault(length, []).append(number)
    return numbers


def _row(question: Question, length: int) -> np.ndarray:
    """Tokens and targets `[2, T]`; a target of -1 does not count."""
    context, continuation = question
    text = [*context, *continuation][-length - 1 :]
    row = np.full((2, length), [[0], [-1]], np.int32)
    row[0, : len(text) - 1] = text[:-1]
    row[1, len(text) - 1 - len(continuation) : len(text) - 1] = continuation
    return row


def _score_function(program: Program) -> Any:
    """(params, tokens[B, T], targets[B, T]) -> sums[B], greedy[B]; compiled for each shape."""
    logits = sharded_logits(program)

    def run(params: Params, tokens_BT: Array, targets_BT: Array) -> tuple[Array, ...]:
        logits_BTV = logits(params, tokens_BT)
        logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
        counts_BT, target_BT = targets_BT >= 0, jnp.maximum(targets_BT, 0)
        logs_BTV = jax.nn.log_softmax(logits_BTV)
        logs_BT = jnp.take_along_axis(logs_BTV, target_BT[..., None], -1)[..., 0]
        sums_B = jnp.where(counts_BT, logs_BT, 0).sum(1)
        greedy_B = (~counts_BT | (logits_BTV.argmax(-1) == target_BT)).all(1)
        return tuple(as_same(all_gather(x, Axis.DP, 0)) for x in (sums_B, greedy_B.astype(int)))

    specs = (program.states.specs["params"], P(Axis.DP), P(Axis.DP))
    mapped = partial(jax.shard_map, mesh=program.mesh, check_vma=True)
    return jax.jit(mapped(run, in_specs=specs, out_specs=P()))
