"""A run as a model of EleutherAI's lm-evaluation-harness.

The harness is imported only when a model is made. Texts are padded to a few lengths, so that few
programs are compiled; padding comes after a text and does not affect its logits. Texts of the same
length are batched and split over the replicas.

Letters: B texts, T position, V vocabulary.
Source: https://github.com/EleutherAI/lm-evaluation-harness, `lm_eval/api/model.py`, 0.4.13.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxptd.api.run import Run
from jaxptd.api.whole_batches import sharded_logits, tokens_field
from jaxptd.collectives import all_gather, as_same
from jaxptd.data.tokenizers import continuation, spelling, until_stop
from jaxptd.errors import UserError, install, quoted
from jaxptd.fields import checked
from jaxptd.mesh import Axis
from jaxptd.params import Params
from jaxptd.run.generator import Generator
from jaxptd.run.sampling import Sampling
from jaxptd.step import Program
from jaxptd.step.program import check_unused

# ---- the log-likelihood of texts of any length ---------------------------------------------------

SHORTEST = 32  # least tokens that a text is padded to
AT_ONCE = 4096  # tokens per replica and batch, unless the model is longer


class Question(NamedTuple):
    """Given ids, at least one, and the ids whose likelihood is wanted."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """The log-likelihood of a continuation, in nats; greedy: each of its ids is most likely."""

    log_likelihood: float
    greedy: bool


class Scorer:
    """Compiled functions of a program that score texts.

    Args:
        program: of a model that continues text, on any layout.

    Raises:
        UserError: the model does not continue text.
    """

    def __init__(self, program: Program) -> None:
        config = program.config
        if tokens_field(config) is None:
            raise UserError(
                f"model.family={config.model.family} does not continue text, so it has no "
                "likelihoods; use a decoder such as gpt or llama"
            )
        self._program, self._score = program, _score_function(program)

    def __call__(self, params: Params, questions: Sequence[Question]) -> list[Score]:
        """Scores continuations, in the order of the questions.

        A text longer than the model loses its first tokens.

        Raises:
            UserError: a continuation is longer than the model.
        """
        scores = [Score(0.0, True)] * len(questions)
        config = self._program.config
        longest, replicas = config.model.seq_length, config.layout.dp
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
    """Splits a document into questions that cover each of its ids once.

    All but the last ask for `length` ids after one given id; the last fills the model's length.

    Args:
        ids: of the document.
        begin: the id before it.
        length: the model's length.
    """
    known = [begin, *ids]
    for first in range(0, len(ids), length):
        last = min(first + length, len(ids))
        start = max(0, last - length)
        yield Question(known[start : first + 1], ids[first:last])


def _by_length(questions: Sequence[Question], longest: int) -> dict[int, list[int]]:
    """The indices of questions, by their padded length."""
    numbers: dict[int, list[int]] = {}
    for number, (context, asked) in enumerate(questions):
        if len(asked) > longest:
            raise UserError(
                f"a continuation has {len(asked)} tokens, but the model takes {longest}; split "
                "it, or use a model with a larger seq_length"
            )
        if asked:
            need = min(len(context) + len(asked) - 1, longest)
            length = min(max(SHORTEST, 1 << (need - 1).bit_length()), longest)
            numbers.setdefault(length, []).append(number)
    return numbers


def _row(question: Question, length: int) -> np.ndarray:
    """Tokens and targets `[2, T]`; a target of -1 does not count."""
    context, asked = question
    text = [*context, *asked][-length - 1 :]
    row = np.full((2, length), [[0], [-1]], np.int32)
    row[0, : len(text) - 1] = text[:-1]
    row[1, len(text) - 1 - len(asked) : len(text) - 1] = asked
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

    # Devices along ep see the same texts, as in generation.
    specs = (program.states.specs["params"], P(Axis.DP), P(Axis.DP))
    mapped = partial(jax.shard_map, mesh=program.mesh, check_vma=True)
    return jax.jit(mapped(run, in_specs=specs, out_specs=P()))


# ---- a run with the harness's interface ----------------------------------------------------------

TOKENS = 256  # tokens to generate by default, as in the harness
NAMES_OF_NUMBER = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@checked("jaxptd.lm_eval_model")
def lm_eval_model(run: Run, *, begin: str | None = None) -> Any:
    """Wraps a run for lm-evaluation-harness, which then scores it on the run's layout.

    >>> model = lm_eval_model(jaxptd.from_hf("models/gpt2"))  # doctest: +SKIP
    >>> lm_eval.simple_evaluate(model, tasks=["hellaswag"])["results"]  # doctest: +SKIP

    Args:
        run: of `jaxptd.load` or `jaxptd.from_hf`, whose model continues a text.
        begin: name of the special token that a text begins with, such as `<|begin_of_text|>`. None:
            what the tokenizer's files begin a text with; where that is nothing, a text without a
            context begins with the end of a document.

    Raises:
        UserError: the harness is not installed, the model continues no text, or the tokenizer has
            no such token.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise UserError(
            f"jaxptd.lm_eval_model needs lm-evaluation-harness; {install('lm-eval')}"
        ) from error
    return type("Model", (Answers, LM), {})(run, begin)


class Answers:
    """Answers the three kinds of requests; a harness `LM` in all but its base class.

    A request's `args` are the texts, and the options of a generation.
    """

    def __init__(self, run: Run, begin: str | None = None) -> None:
        super().__init__()
        self._run, self._scorer = run, Scorer(run.program)
        self._vocab_size = min(run.tokenizer.vocab_size, run.config.model.vocab_size or 0)
        sampling, ends = Sampling(temperature=0), run.tokenizer.ends
        self._generator = Generator(run.program, self._vocab_size, sampling, ends)
        self._prefix = list(run.tokenizer.begin) if begin is None else [self._special(begin)]

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness caches requests."""
        return self._run.config.data.tokenizer

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Scores the continuation of each (context, continuation).

        Returns:
            Log-likelihoods in nats, and whether every token of a continuation is most likely.
        """
        scores = self._scores([self._split(*request.args) for request in requests])
        return [(score.log_likelihood, score.greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods in nats of whole texts, which may be longer than the model."""
        length = self._run.config.model.seq_length
        texts = [list(windows(self._ids(r.args[0]), self._begin[-1], length)) for r in requests]
        scores = iter(self._scores([window for each in texts for window in each]))
        return [sum(next(scores).log_likelihood for _ in each) for each in texts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues each context with the most likely tokens, up to the first of its stops."""
        return [self._continued(context, options) for context, options in _args(requests)]

    def _scores(self, questions: Sequence[Question]) -> list[Score]:
        check_unused(self._run.arrays)
        return self._scorer(self._run.arrays["params"], questions)

    def _split(self, context: str, continuation: str) -> Question:
        """The ids of both; spaces between them belong to the continuation, as tokens do."""
        stripped = context.rstrip()
        ids, known = self._ids(context + continuation), self._ids(stripped)
        continuation_ids = ids[len(known) :]
        if not continuation_ids:
            raise UserError(
                f"a request asks for the likelihood of {quoted(repr(continuation))} after "
                f"{quoted(repr(context[-40:]))}, which has no tokens; correct the task's choices"
            )
        return Question(self._begun(known), continuation_ids)

    def _begun(self, ids: list[int]) -> list[int]:
        """The ids with begin tokens in front, at least one, unless already present."""
        if ids[: len(self._prefix)] == self._prefix:
            return ids or self._begin
        return [*self._prefix, *ids]

    def _continued(self, context: str, options: Mapping[str, Any]) -> str:
        longest, tokenizer = self._run.config.model.seq_length, self._run.tokenizer
        tokens = _number(options)
        if not 0 < tokens < longest:
            raise UserError(
                f"max_gen_toks={tokens} leaves no room for a context in the model's {longest} "
                f"tokens; use 1 to {longest - 1}"
            )
        check_unused(self._run.arrays)
        ids = self._begun(self._ids(context))[-(longest - tokens) :]
        continuations = self._generator.generate_many(self._run.arrays["params"], ids, tokens)
        text = continuation(tokenizer, ids, continuations)
        return until_stop(text, _stops(options))

    @property
    def _begin(self) -> list[int]:
        """The ids before a text without context."""
        return self._prefix or [self._run.tokenizer.end_of_document]

    def _special(self, name: str) -> int:
        token = self._run.tokenizer.token_id(name)
        if token is None:
            raise UserError(
                f"begin={name!r} is not a token of data.tokenizer={self.tokenizer_name!r}; use the "
                "name of one, or None"
            )
        return token

    def _ids(self, text: str) -> list[int]:
        """The ids of a text. Raises UserError for an id that the model does not know."""
        ids: list[int] = self._run.tokenizer.encode(text).tolist()
        if ids and max(ids) >= self._vocab_size:
            raise UserError(
                f"a text has id {max(ids)}, but the model knows only 0 to {self._vocab_size - 1}; "
                f"leave {spelling(self._run.tokenizer, max(ids))} out of it, or use the tokenizer "
                "that the model was trained with"
            )
        return ids


def _args(requests: Sequence[Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """The context and the options of each request.

    Raises:
        UserError: a request asks for sampling.
    """
    for request in requests:
        context, options = request.args
        if options.get("do_sample", options.get("temperature", 0) > 0):
            raise UserError(
                "a request has do_sample or a temperature, but generation here is greedy; set "
                "do_sample=False"
            )
        yield context, options


def _number(options: Mapping[str, Any]) -> int:
    """The maximum number of tokens to generate."""
    named = [options[name] for name in NAMES_OF_NUMBER if options.get(name) is not None]
    return int(named[0]) if named else TOKENS


def _stops(options: Mapping[str, Any]) -> list[str]:
    """The texts before which a generation ends."""
    until = options.get("until") or []
    return [until] if isinstance(until, str) else [each for each in until if each]
