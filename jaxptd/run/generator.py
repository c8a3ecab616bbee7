"""Generates tokens with a trained model and a cache of keys and values.

Letters: B batch (texts side by side), T position, V vocabulary, K most likely tokens, N generated
ids.
"""

import collections
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

from jaxptd.collectives import all_gather, as_same, as_varying, varying_axes
from jaxptd.config import Config, DataConfig, ModelConfig
from jaxptd.data import Samples, Tokenizer
from jaxptd.data.sources import STDLIB
from jaxptd.data.tokenizers import BYTES, UNKNOWN
from jaxptd.errors import UserError
from jaxptd.layers.dropout import TokenInfo
from jaxptd.matmul.precision import exact_products
from jaxptd.mesh import Axis
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
AT_ONCE = 2**14  # tokens that the caches of texts side by side hold on each replica
TEXTS = P(Axis.DP)  # texts are split over dp; devices along other axes write the same ones


class Steps(NamedTuple):
    """The steps of a generation.

    Args:
        forward: (batch, position of its first token, state) -> the drawn ids `[B]`, and the state:
            which ids a text has, if draws depend on them, and the model's caches.
        write: (ids that are given or `NONE` `[N, B]`, position of the first, number of ids, the
            drawn ids, state) -> ids `[N, B]`, the drawn ids and the state behind them. The ids
            behind a text's end are `NONE`. When every text has ended, the loop stops.
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
            if self.drafts is None or not count:
                yield from self._write_on(params, [prompt], [count], places=[place])
                return
            first, key = self._writing.first(self._model, prompt), self._keys([place], 1)[0]
            found = self._write_ahead(params, first, key, np.zeros(count, np.int32))
            yield self._counted(*found)[:count]

        return list(itertools.chain.from_iterable(self._in_parts(write, prompt, tokens)))

    def stream(
        self, params: Params, prompt: Sequence[int], tokens: int, *, shares: bool = False
    ) -> Chunks:
        """Generates the ids of a call, and yields them as they are drawn, `CHUNK` at a time.

        Without drafts: they are not made. shares: the prompt is read as by `generate_many`.
        """
        return self._in_parts(partial(self._chunks, params, shares=shares), prompt, tokens)

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

    def generate_many(
        self, params: Params, prompts: Sequence[Sequence[int]], tokens: Sequence[int]
    ) -> Iterator[tuple[int, list[int]]]:
        """Generates as calls do, several texts side by side, and yields (number of a prompt, ids).

        tokens: to write after each prompt at most.

        `SHAPES` prompt lengths share a compiled program, which takes the beginning of prompts in
        one pass and the rest one token at a time. A prompt that is continued must fit the model,
        together with its tokens. Without drafts.
        """
        continues, model = self._writing.continues, self._model
        most = model.seq_length if continues else model.target_length
        counts = [min(count, most) for count in tokens]
        alike = collections.defaultdict[int, list[int]](list)
        for number, prompt in enumerate(prompts):
            alike[self._at_once(prompt)].append(number)
        at_once = max(1, AT_ONCE // model.seq_length) * self._replicas
        for first, numbers in alike.items():
            size = min(at_once, self._rows(len(numbers)))
            for start in range(0, len(numbers), size):
                some = numbers[start : start + size]
                texts = [prompts[number] for number in some]
                places = [len(each) if continues else 0 for each in texts]
                found = self._write_on(
                    *(params, texts, [counts[number] for number in some]),
                    places=places,
                    first=first,
                    size=size,
                    longest=SHAPES - 1 + max(counts),
                )
                yield from zip(some, found, strict=True)

    def _at_once(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that are read in one pass, if it shares a compiled program."""
        if not self._writing.continues:
            return len(prompt)
        return len(prompt) // SHAPES * SHAPES or 1

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
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        *,
        places: Sequence[int],
        first: int | None = None,
        size: int = 1,
        longest: int | None = None,
    ) -> list[list[int]]:
        """Generates ids after each prompt in one go, or fewer where a text ends.

        Args:
            params: of the model.
            prompts: of texts side by side.
            counts: ids to write after each prompt at most.
            places: positions of the first drawn ids, which key their random numbers.
            first: tokens of each prompt that are read in one pass; None: all.
            size: texts of the program, which repeats the last prompt if there are fewer.
            longest: most ids after a prompt's first pass for which the program is compiled, given
                or drawn; None: as many as these texts need.
        """
        size = self._rows(size)
        prompts = [*prompts, *[prompts[-1]] * (size - len(prompts))]
        batch, keys_B = self._batch([each[:first] for each in prompts]), self._keys(places, size)
        rests = [() if first is None else each[first:] for each in prompts]
        number = max(len(rest) + count for rest, count in zip(rests, counts, strict=False))
        given_NB = _given(rests, longest or number)
        ids_NB = np.asarray(self._write(params, batch, keys_B, given_NB, np.int32(number)))
        written = zip(ids_NB.T.tolist(), rests, counts, strict=False)
        return [
            [token for token in ids[len(rest) :][:count] if token != NONE]
            for ids, rest, count in written
        ]

    def _rows(self, texts: int) -> int:
        """The least texts that a program writes for so many: the same number on each replica."""
        return -(-texts // self._replicas) * self._replicas

    @property
    def _replicas(self) -> int:
        return self.program.config.layout.dp

    def _batch(self, prompts: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        batches = [self._writing.first(self._model, prompt) for prompt in prompts]
        return {name: np.concatenate([each[name] for each in batches]) for name in batches[0]}

    def _keys(self, places: Sequence[int], size: int) -> Array:
        """The keys of texts' random numbers, `[size]`; the last place's are repeated."""
        key = jax.random.key(self.sampling.seed)
        places_B = np.pad(np.array(places, np.uint32), (0, size - len(places)), mode="edge")
        return jax.vmap(partial(jax.random.fold_in, key))(places_B)

    @cached_property
    def _write(self) -> Callable[..., Array]:
        """(params, first batch, keys[B], given[N, B], number) -> ids[N, B].

        Compiled once for each shape.
        """
        specs = (self.program.states.specs["params"], TEXTS, TEXTS, P(None, *TEXTS), P())
        mesh = self.program.mesh
        return jax.jit(
            jax.shard_map(self._run, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
        )

    def _run(
        self, params: Params, batch: Batch, keys_B: Array, given_NB: Array, number: Array
    ) -> Array:
        """First batch -> ids[N, B]: the prompt in one pass, then one token at a time.

        A given id replaces the drawn one. `Steps.write` says where ids are `NONE`.
        """
        steps, (size, length) = self._steps(params, keys_B), batch[self._writing.field].shape
        first = steps.forward(batch, jnp.int32(0), steps.empty_state(size))
        return _of_all(steps.write(given_NB, length, number, *first)[0])

    def _steps(self, params: Params, keys_B: Array) -> "Steps":
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
            of_place = jax.vmap(lambda key: jax.random.fold_in(key, last))
            ids_B = self._draw(logits_BTV[:, -1:], of_place(keys_B), text_BV)
            # Typed as varying where ZeRO gathered.
            return as_same(ids_B, but=TEXTS), (text_BV, caches)

        def write(
            given_NB: Array, length: int | Array, count: int | Array, drawn_B: Array, state: Any
        ) -> tuple[Array, Array, Any]:
            def ended(i: Array, drawn_B: Array, ended_B: Array) -> tuple[Array, Array]:
                end_B = jnp.isin(drawn_B, jnp.array(self.ends, jnp.int32))
                ended_B |= end_B & (given_NB[i] == NONE)
                return ended_B, (i < count) & (as_same((~ended_B).any().astype(jnp.int32)) > 0)

            def advance(carry: Any) -> Any:
                i, ids_NB, drawn_B, (ended_B, _), state = carry
                token_B = jnp.where(given_NB[i] == NONE, drawn_B, given_NB[i])
                drawn_B, state = forward({field: token_B[:, None]}, length + i, state)
                ids_NB = ids_NB.at[i].set(jnp.where(ended_B, NONE, token_B))
                return i + 1, ids_NB, drawn_B, ended(i + 1, drawn_B, ended_B), state

            none_NB = as_varying(jnp.full_like(given_NB, NONE), varying_axes(drawn_B))
            first = ended(jnp.int32(0), drawn_B, jnp.zeros_like(drawn_B, bool))
            carry = jnp.int32(0), none_NB, drawn_B, first, state
            _, ids_NB, drawn_B, _, state = lax.while_loop(lambda x: x[3][1], advance, carry)
            return ids_NB, drawn_B, state

        def empty_state(size: int) -> Any:
            reads = self.sampling.reads_text
            text_BV = jnp.zeros((size, self.vocab_size), bool) if reads else None
            return text_BV, passes.empty_state(params, size)

        return Steps(forward, write, empty_state)

    # ---- a few tokens at a time -----------------------------------------------------------------

    def _chunks(
        self, params: Params, prompt: Sequence[int], count: int, place: int, *, shares: bool
    ) -> Chunks:
        """Generates as `_write_on` does, `CHUNK` ids at a time."""
        begin, go_on = self._chunk_functions
        first = self._at_once(prompt) if shares else len(prompt)
        rest, size = prompt[first:], self._rows(1)
        batch, keys_B = self._batch([prompt[:first]] * size), self._keys([place], size)
        length = batch[self._writing.field].shape[1]
        drawn_B, state = begin(params, batch, keys_B)
        for start in range(0, len(rest) + count, CHUNK):
            number = min(CHUNK, len(rest) + count - start)
            given_NB = _given([rest[start : start + CHUNK]] * size, CHUNK)
            numbers = np.int32(length + start), np.int32(number)
            ids_NB, drawn_B, state = go_on(params, keys_B, given_NB, *numbers, drawn_B, state)
            ids = [token for token in np.asarray(ids_NB)[:, 0].tolist() if token != NONE]
            yield ids[max(len(rest) - start, 0) :]
            if len(ids) < number:
                return

    @cached_property
    def _chunk_functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """(params, first batch, keys[B]) -> drawn, state; `_go_on` with the state's specs.

        Each device's part of the state is a row of an array, split over the axes along which it
        differs. So its type in the next call is the one that it had, and nothing is sent.
        """
        mapped = partial(jax.shard_map, mesh=self.program.mesh, check_vma=True)
        in_specs = (self.program.states.specs["params"], TEXTS, TEXTS)
        specs: Any = None

        def look(params: Params, batch: Batch, keys_B: Array) -> Array:
            nonlocal specs
            drawn_B, state = self._begin(params, batch, keys_B)
            specs = jax.tree.map(lambda x: P(tuple(sorted(varying_axes(x)))), state)
            return drawn_B

        params, size = self.program.abstract_state["params"], self._rows(1)
        mapped_look = mapped(look, in_specs=in_specs, out_specs=TEXTS)
        jax.eval_shape(mapped_look, params, self._batch([[0]] * size), self._keys([0], size))
        begin = mapped(self._begin, in_specs=in_specs, out_specs=(TEXTS, specs))
        further = (in_specs[0], TEXTS, P(None, *TEXTS), P(), P(), TEXTS, specs)
        go_on = mapped(self._go_on, in_specs=further, out_specs=(P(), TEXTS, specs))
        return jax.jit(begin), jax.jit(go_on, donate_argnames="state")

    def _begin(self, params: Params, batch: Batch, keys_B: Array) -> tuple[Array, Any]:
        """First batch -> the drawn ids behind it `[B]`, and the state as rows."""
        steps, size = self._steps(params, keys_B), len(batch[self._writing.field])
        drawn_B, state = steps.forward(batch, jnp.int32(0), steps.empty_state(size))
        return drawn_B, jax.tree.map(lambda x: x[None], state)

    def _go_on(
        self,
        params: Params,
        keys_B: Array,
        given_NB: Array,
        length: Array,
        count: Array,
        drawn_B: Array,
        state: Any,
    ) -> tuple[Array, Array, Any]:
        """Drawn ids and the state before them -> up to `CHUNK` ids, and both behind these."""
        state = jax.tree.map(lambda x: x[0], state)
        write = self._steps(params, keys_B).write
        ids_NB, drawn_B, state = write(given_NB, length, count, drawn_B, state)
        return _of_all(ids_NB), drawn_B, jax.tree.map(lambda x: x[None], state)

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
            lambda logits, place: as_same(self._draw(logits, jax.random.fold_in(key, place)[None])),
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

    def _draw(self, logits_B1V: Array, keys_B: Array, text_BV: Array | None = None) -> Array:
        """Logits of the next token, sharded over V -> its id, `[B]`, equal on devices of a text.

        text_BV: which tokens a text has, if the draw depends on them.
        """
        logits_BV = self._resolved.tensor_parallel.axes.gather(logits_B1V, 2)[:, 0]
        return self.sampling.draw(logits_BV[:, : self.vocab_size], keys_B, text_BV)

    def _tokens_in(self, token_BT: Array) -> Array:
        """Which ids are among some tokens, bool[B, V]."""
        rows_B1 = jnp.arange(len(token_BT))[:, None]
        none_BV = jnp.zeros((len(token_BT), self.vocab_size), bool)
        return none_BV.at[rows_B1, token_BT].set(True, mode="drop")


def _given(rests: Sequence[Sequence[int]], count: int) -> np.ndarray:
    """The ids that texts begin with, int32[N, B], and `NONE` behind them; N is `count`."""
    given_BN = [[*rest, *[NONE] * (count - len(rest))] for rest in rests]
    return np.array(given_BN, np.int32).reshape(len(rests), count).T


def _of_all(ids_NB: Array) -> Array:
    """The ids of the texts of all replicas, on every device."""
    return as_same(all_gather(ids_NB, Axis.DP, 1))


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
