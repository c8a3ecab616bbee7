"""Generates tokens with a trained model and a cache of keys and values.

Letters: B batch (one text), T position, V vocabulary, K most likely tokens, N generated ids.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxptd.collectives import as_same, varying_axes
from jaxptd.config import Config, DataConfig, ModelConfig
from jaxptd.data import Samples, Tokenizer
from jaxptd.data.sources import STDLIB
from jaxptd.data.tokenizers import BYTES, UNKNOWN
from jaxptd.errors import UserError
from jaxptd.layers.dropout import TokenInfo
from jaxptd.matmul.precision import exact_products
from jaxptd.models.families import family_of
from jaxptd.models.family import Writing
from jaxptd.params import Params
from jaxptd.run.sampling import Sampling
from jaxptd.run.speculative import Drafts, Speculation
from jaxptd.step import Batch, Program
from jaxptd.step.pipelined import make_passes
from jaxptd.step.resolved import ResolvedConfig, resolve_for_decoding

Chunks = Iterator[list[int]]  # the ids of a text, some at a time
Write = Callable[[Sequence[int], int, int], Chunks]  # (prompt, number, place) -> ids
CHUNK = 8  # tokens that a stream waits for: each call gathers what ZeRO shards
NONE = -1  # stands for "no id"
SHAPES = 64  # prompt lengths are rounded to this many tokens, so that few programs are compiled


class Steps(NamedTuple):
    """The steps of a generation.

    Args:
        forward: (batch, position of its first token, state) -> the drawn ids `[B]`, and the state:
            which ids a text has, if draws depend on them, and the model's caches.
        write: (ids that are given or `NONE` `[N]`, position of the first, number of ids, the drawn
            ids, state) -> ids `[N, B]`, the drawn ids and the state behind them. When every text
            has ended, the loop stops and the remaining ids are `NONE`.
        empty_state: number of texts -> the state before their first tokens.
    """

    forward: Callable[..., tuple[Array, Any]]
    write: Callable[..., tuple[Array, Array, Any]]
    empty_state: Callable[[int], Any]


@dataclasses.dataclass(frozen=True)
class Generator:
    """Generates text with a program's model, on its mesh and with its layout of parameters.

    Args:
        program: has the model. Its layout may shard sequences, but generation does not.
        vocab_size: only ids below this are drawn.
        sampling: how tokens are drawn.
        ends: ids that end a text when drawn; the end itself is left out.
        drafts: counts, if MTP modules draft tokens that the model checks; None: they do not.

    Raises:
        UserError: with drafts, the model has no MTP modules, or draws depend on the text.
    """

    program: Program
    vocab_size: int
    sampling: Sampling
    ends: tuple[int, ...] = ()
    drafts: Drafts | None = None

    def __post_init__(self) -> None:
        if self.drafts is not None and not self._model.ahead:
            raise UserError(
                "speculative generation needs the modules of model.mtp, which this model does not "
                "have; leave it out, or train a model with model.mtp.layers=1"
            )
        if self.drafts is not None and self.sampling.reads_text:
            raise UserError(
                f"repetition_penalty={self.sampling.repetition_penalty} with speculative "
                "generation: drafts of one pass do not see each other; leave one of them out"
            )

    @cached_property
    def _resolved(self) -> ResolvedConfig:
        """The program's resolved choices, without sharded tokens.

        Caches are long enough for drafts behind the last token.
        """
        resolved = resolve_for_decoding(self.program.config, self.program.mesh)
        if self.drafts is None:
            return resolved
        longer = resolved.model.with_lengths(lambda length: length + self._model.ahead)
        return dataclasses.replace(resolved, model=longer)

    def __call__(self, params: Params, prompt: Sequence[int], tokens: int) -> list[int]:
        """Generates `tokens` ids that follow the prompt, or fewer if the text ends.

        An encoder-decoder's answer has at most model.encoder_decoder.seq_length tokens.
        """

        def write(prompt: Sequence[int], count: int, place: int) -> Chunks:
            yield self._write_on(params, prompt, count, place=place)

        return list(itertools.chain.from_iterable(self._in_parts(write, prompt, tokens)))

    def stream(self, params: Params, prompt: Sequence[int], tokens: int) -> Chunks:
        """Generates the ids of a call, and yields them as they are drawn, `CHUNK` at a time.

        Without drafts: they are not made.
        """
        return self._in_parts(partial(self._chunks, params), prompt, tokens)

    def _in_parts(self, write: Write, prompt: Sequence[int], tokens: int) -> Chunks:
        """The ids that follow the prompt; a text that is full goes on from its last half.

        write: the ids after a prompt that leaves room for them, and fewer if the text ends.
        """
        if not self._writing.continues:
            yield from write(prompt, min(tokens, self._model.target_length), 0)
            return
        text, longest = list(prompt), self.program.config.model.seq_length
        end = len(text) + tokens
        while len(text) < end:
            seen = text[-max(longest // 2, 1) :] if len(text) >= longest else text
            full = len(text) + min(end - len(text), longest - len(seen))
            for ids in write(seen, full - len(text), len(text)):
                text += ids
                yield ids
            if len(text) < full:
                break

    def generate_many(self, params: Params, prompt: Sequence[int], tokens: int) -> list[int]:
        """Generates as a call does, for many prompts that the model continues.

        `SHAPES` prompt lengths share a compiled program, which takes the beginning of a prompt in
        one pass and the rest one token at a time. Prompt and tokens together must fit the model.
        """
        first = len(prompt) // SHAPES * SHAPES or 1
        given = prompt[first:]
        count = min(SHAPES - 1 + tokens, self._model.seq_length - first)
        written = self._write_on(params, prompt[:first], count, place=len(prompt), given=given)
        return written[len(given) :][:tokens]

    @property
    def _model(self) -> ModelConfig:
        return self.program.config.model

    @property
    def _writing(self) -> Writing:
        writing = family_of(self._model).writing
        assert writing is not None
        return writing

    def _write_on(
        self,
        params: Params,
        prompt: Sequence[int],
        count: int,
        *,
        place: int = 0,
        given: Sequence[int] = (),
    ) -> list[int]:
        """Generates `count` ids in one go, or fewer if the text ends; the first may be given.

        place: position of the first drawn id in the text, which keys its random numbers.
        """
        given_N = np.pad(np.array(given, np.int32), (0, count - len(given)), constant_values=NONE)
        batch, key = self._first(prompt), self._key(place)
        if self.drafts is not None and count and not given:
            found = self._write_ahead(params, batch, key, np.zeros(count, np.int32))
            return self._counted(*found)[:count]
        written = np.asarray(self._write(params, batch, key, given_N))[:, 0]
        return [token for token in written.tolist() if token != NONE]

    def _first(self, prompt: Sequence[int]) -> dict[str, np.ndarray]:
        return self._writing.first(self._model, prompt)

    def _key(self, place: int) -> Array:
        return jax.random.fold_in(jax.random.key(self.sampling.seed), place)

    @cached_property
    def _write(self) -> Callable[..., Array]:
        """(params, first batch, key, given[N]) -> ids[N, B]; compiled once for each shape."""
        specs = (self.program.states.specs["params"], P(), P(), P())
        mesh = self.program.mesh
        return jax.jit(
            jax.shard_map(self._run, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
        )

    def _run(self, params: Params, batch: Batch, key: Array, given_N: Array) -> Array:
        """First batch -> ids[N, B]: the prompt in one pass, then one token at a time.

        A given id replaces the drawn one. When every text has ended, the loop stops and the
        remaining ids are `NONE`.
        """
        steps, (size, length) = self._steps(params, key), batch[self._writing.field].shape
        first = steps.forward(batch, jnp.int32(0), steps.empty_state(size))
        return steps.write(given_N, length, len(given_N), *first)[0]

    def _steps(self, params: Params, key: Array) -> "Steps":
        """Makes the steps of a generation, inside `shard_map`."""
        passes, field = make_passes(self._resolved), self._writing.field
        params = passes.gathered(self._resolved.zero.begin_step(params, training=False))
        compute = exact_products(passes.logits, self._model.dtype, self.program.mesh)

        def forward(batch: Batch, start: Array, state: Any) -> tuple[Array, Any]:
            text_BV, caches = state
            if text_BV is not None:
                text_BV |= self._tokens_in(batch[field])
            logits_BTV, caches = compute(params, batch, self._places(batch, start), caches)
            last = start + logits_BTV.shape[1] - 1  # the same however a prompt is read in parts
            ids_B = self._draw(logits_BTV[:, -1:], jax.random.fold_in(key, last), text_BV)
            return as_same(ids_B), (text_BV, caches)  # typed as varying where ZeRO gathered

        def write(
            given_N: Array, length: int | Array, count: int | Array, drawn_B: Array, state: Any
        ) -> tuple[Array, Array, Any]:
            def goes_on(carry: tuple[Array, Array, Array, Any]) -> Array:
                i, _, drawn_B, _ = carry
                end_B = jnp.isin(drawn_B, jnp.array(self.ends, jnp.int32))
                return (i < count) & ~(jnp.all(end_B) & (given_N[i] == NONE))

            def advance(carry: tuple[Array, Array, Array, Any]) -> tuple[Array, Array, Array, Any]:
                i, ids_NB, drawn_B, state = carry
                token_B = jnp.where(given_N[i] == NONE, drawn_B, given_N[i])
                drawn_B, state = forward({field: token_B[:, None]}, length + i, state)
                return i + 1, ids_NB.at[i].set(token_B), drawn_B, state

            none_NB = jnp.full((len(given_N), len(drawn_B)), NONE, jnp.int32)
            first = (jnp.int32(0), none_NB, drawn_B, state)
            return lax.while_loop(goes_on, advance, first)[1:]

        def empty_state(size: int) -> Any:
            reads = self.sampling.reads_text
            text_BV = jnp.zeros((size, self.vocab_size), bool) if reads else None
            return text_BV, passes.empty_state(params, size)

        return Steps(forward, write, empty_state)

    # ---- a few tokens at a time -----------------------------------------------------------------

    def _chunks(self, params: Params, prompt: Sequence[int], count: int, place: int) -> Chunks:
        """Generates as `_write_on` does, `CHUNK` ids at a time."""
        begin, go_on = self._chunk_functions
        batch, key = self._first(prompt), self._key(place)
        length = batch[self._writing.field].shape[1]
        drawn_B, state = begin(params, batch, key)
        for first in range(0, count, CHUNK):
            size = min(CHUNK, count - first)
            numbers = np.int32(length + first), np.int32(size)
            ids_NB, drawn_B, state = go_on(params, key, *numbers, drawn_B, state)
            ids = [token for token in np.asarray(ids_NB)[:, 0].tolist() if token != NONE]
            yield ids
            if len(ids) < size:
                return

    @cached_property
    def _chunk_functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """(params, first batch, key) -> drawn, state; `_go_on` with the state's specs.

        Each device's part of the state is a row of an array, split over the axes along which it
        differs. So its type in the next call is the one that it had, and nothing is sent.
        """
        mapped = partial(jax.shard_map, mesh=self.program.mesh, check_vma=True)
        in_specs = (self.program.states.specs["params"], P(), P())
        specs: Any = None

        def look(params: Params, batch: Batch, key: Array) -> Array:
            nonlocal specs
            drawn_B, state = self._begin(params, batch, key)
            specs = jax.tree.map(lambda x: P(tuple(sorted(varying_axes(x)))), state)
            return drawn_B

        params, key = self.program.abstract_state["params"], jax.random.key(0)
        jax.eval_shape(
            mapped(look, in_specs=in_specs, out_specs=P()), params, self._first([0]), key
        )
        begin = mapped(self._begin, in_specs=in_specs, out_specs=(P(), specs))
        in_specs = (in_specs[0], *[P()] * 4, specs)
        go_on = mapped(self._go_on, in_specs=in_specs, out_specs=(P(), P(), specs))
        return jax.jit(begin), jax.jit(go_on, donate_argnames="state")

    def _begin(self, params: Params, batch: Batch, key: Array) -> tuple[Array, Any]:
        """First batch -> the drawn ids behind it `[B]`, and the state as rows."""
        steps, size = self._steps(params, key), len(batch[self._writing.field])
        drawn_B, state = steps.forward(batch, jnp.int32(0), steps.empty_state(size))
        return drawn_B, jax.tree.map(lambda x: x[None], state)

    def _go_on(
        self, params: Params, key: Array, length: Array, count: Array, drawn_B: Array, state: Any
    ) -> tuple[Array, Array, Any]:
        """Drawn ids and the state before them -> up to `CHUNK` ids, and both behind these."""
        none_N = jnp.full(CHUNK, NONE, jnp.int32)
        state = jax.tree.map(lambda x: x[0], state)
        write = self._steps(params, key).write
        ids_NB, drawn_B, state = write(none_N, length, count, drawn_B, state)
        return ids_NB, drawn_B, jax.tree.map(lambda x: x[None], state)

    # ---- with drafts ----------------------------------------------------------------------------

    def _counted(self, ids_N: Array, written: Array, rounds: Array, kept: Array) -> list[int]:
        """The ids up to the text's end; adds the counts of its rounds to `drafts`."""
        assert self.drafts is not None
        self.drafts.rounds += int(rounds)
        self.drafts.drafted += int(rounds) * self._model.ahead
        self.drafts.kept += int(kept)
        text: list[int] = np.asarray(ids_N)[: int(written)].tolist()
        return list(itertools.takewhile(lambda token: token not in self.ends, text))

    @cached_property
    def _write_ahead(self) -> Callable[..., tuple[Array, Array, Array, Array]]:
        """(params, first batch, key, [N]) -> `Speculation.run`; compiled once for each shape."""
        specs = (self.program.states.specs["params"], P(), P(), P())
        mesh = self.program.mesh
        return jax.jit(
            jax.shard_map(self._run_ahead, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
        )

    def _run_ahead(
        self, params: Params, batch: Batch, key: Array, like_N: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Arguments and results as of `_write_ahead`."""
        passes, field = make_passes(self._resolved), self._writing.field
        params = passes.gathered(self._resolved.zero.begin_step(params, training=False))
        compute = exact_products(passes.logits, self._model.dtype, self.program.mesh)

        def of(model: Any, x: Any) -> Any:
            return model.output_and_stream(x)

        def forward(tokens_BT: Array, start: Array, state: Any) -> Any:
            batch = {field: tokens_BT}
            return compute(params, batch, self._places(batch, start), state, of=of)

        rounds = Speculation(
            self._resolved.blueprint.build(params),
            forward,
            lambda tokens_BT, start: self._places({field: tokens_BT}, start),
            lambda logits, place: as_same(self._draw(logits, jax.random.fold_in(key, place))),
            self.ends,
        )
        run = exact_products(rounds.run, self._model.dtype, self.program.mesh)
        return run(batch[field], passes.empty_state(params, 1), len(like_N))

    def _places(self, batch: Batch, start: Array) -> TokenInfo:
        """The positions of a batch's sequences, from `start` for the first token."""
        info: TokenInfo | None = None
        for each in family_of(self._model).sequences:
            if each.tokens in batch:
                size, length = batch[each.tokens].shape
                position_T = start + jnp.arange(length, dtype=jnp.int32)
                segment_BT = each.documents(batch)
                segment_BCT = None if segment_BT is None else segment_BT[:, None]
                sample_B = jnp.zeros(size, jnp.int32)
                info = TokenInfo(sample_B, position_T, None, segment_BCT, info)
        assert info is not None
        return info

    def _draw(self, logits_B1V: Array, key: Array, text_BV: Array | None = None) -> Array:
        """Logits of the next token, sharded over V -> its id, `[B]`, equal on every device.

        text_BV: which tokens a text has, if the draw depends on them.
        """
        logits_BV = self._resolved.tensor_parallel.axes.gather(logits_B1V, 2)[:, 0]
        return self.sampling.draw(logits_BV[:, : self.vocab_size], key, text_BV)

    def _tokens_in(self, token_BT: Array) -> Array:
        """Which ids are among some tokens, bool[B, V]."""
        rows_B1 = jnp.arange(len(token_BT))[:, None]
        none_BV = jnp.zeros((len(token_BT), self.vocab_size), bool)
        return none_BV.at[rows_B1, token_BT].set(True, mode="drop")


# ---- the sample at the end of a run --------------------------------------------------------------


class Settings(TypedDict, total=False):
    """Fields of `jaxptd.run.generator.Sampling`; the rest keep their defaults."""

    temperature: float
    top_k: int


# A byte-level model needs a long prompt and a lower temperature than one of words: one unlikely
# letter spoils the word and everything after it.
PROMPT = "class Reader:\n    def __init__(self, path):\n        self."
BYTES_SETTINGS = Settings(temperature=0.7, top_k=10)
PROMPT_TOKENS = 48


def final_sample(
    write: Callable[..., str], config: Config, tokenizer: Tokenizer, validation: Samples | None
) -> str:
    """The sample at the end of a run, between two horizontal rules.

    Args:
        write: `Run.sample`, which continues a prompt.
        config: of the run.
        tokenizer: of the run.
        validation: held-out text, if there is any.
    """
    prompt = sample_prompt(config.data, tokenizer, validation)
    settings = sample_settings(config.data)
    try:
        text = write(prompt, tokens=config.train.sample_tokens, seed=config.train.seed, **settings)
    except UserError as error:  # token files whose vocabulary lacks the prompt's ids
        return f"no sample: {error}"
    rule = "-" * 72
    return f"{rule}\n{tidy(text)}\n{rule}"


def sample_prompt(data: DataConfig, tokenizer: Tokenizer, validation: Samples | None) -> str:
    """A prompt: Python code for the standard library, else the beginning of held-out text.

    Empty, which starts a document, if there is no held-out text.
    """
    if data.source == STDLIB:
        return PROMPT
    if validation is None:
        return ""
    ids = validation.first_tokens(min(PROMPT_TOKENS, validation.seq_length))
    text = tidy(tokenizer.decode(ids.tolist()).strip(UNKNOWN))
    return text.rpartition(" ")[0] or text  # the last word may be cut off


def sample_settings(data: DataConfig) -> Settings:
    """Sampling settings that suit the tokenizer."""
    return BYTES_SETTINGS if data.tokenizer == BYTES else Settings()


def tidy(text: str) -> str:
    """The nonblank lines of a text, without control codes and trailing spaces."""
    shown = (c if c.isprintable() or c in "\n\t" else UNKNOWN for c in text.replace("\r", "\n"))
    lines = (line.rstrip() for line in "".join(shown).split("\n"))
    return "\n".join(line for line in lines if line)
