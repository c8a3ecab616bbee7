"""Generates text with a trained model and a cache of keys and values.

`python -m jaxptd.generate --run-dir runs/quickstart --prompt "def " --tokens 200` reads the newest
good checkpoint of a run. A text that fills the model's seq_length is continued from its last half.

Letters: B batch (one text), T position, V vocabulary, K most likely tokens.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxptd.collectives import as_same
from jaxptd.commands.words import add_words, path_option
from jaxptd.config.command_line import load_config
from jaxptd.data.tokenizers import Tokenizer
from jaxptd.display import callable_module
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.fields import checked
from jaxptd.hf.load import load_model
from jaxptd.layers.dropout import Places
from jaxptd.mesh import Layout
from jaxptd.models.families import family_of, tokenizer_of
from jaxptd.params import Params
from jaxptd.run.progress.display import printable
from jaxptd.step import Program
from jaxptd.step.passes import make_passes
from jaxptd.step.resolved import Resolved, resolve_for_decoding

MOST_TOKENS = 1_000_000  # of one text
AXES = ("tp", "pp", "row", "col", "cp")  # devices along cp all generate the same
GREEDY = 1e-6  # lower temperatures take the most likely token; float32 could not divide by them


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings for drawing the next token.

    Args:
        temperature: of the softmax; 0 takes the most likely token.
        top_k: draw from the k most likely tokens only; 0 from all.
        seed: of the draws.
    """

    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature} must be a number, 0 or more")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} must be 0 (all tokens) or more")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed} must be 0 or more, and below 2**32")


@dataclasses.dataclass(frozen=True)
class Generator:
    """Generates text with a program's model, on its mesh and with its layout of parameters.

    Args:
        program: with the model; its layout may shard sequences, but generation shards none.
        vocab_size: only ids below this are drawn.
        sampling: settings of the draws.
    """

    program: Program
    vocab_size: int
    sampling: Sampling

    @cached_property
    def _resolved(self) -> Resolved:
        """The program's choices, with a form that shards no token."""
        return resolve_for_decoding(self.program.config, self.program.mesh)

    def __call__(self, params: Params, prompt: Sequence[int], tokens: int) -> list[int]:
        """Generates `tokens` ids that follow the prompt's."""
        text, longest = list(prompt), self.program.config.model.seq_length
        end = len(text) + tokens
        while len(text) < end:
            seen = text[-max(longest // 2, 1) :] if len(text) >= longest else text
            count = min(end - len(text), longest - len(seen))
            key = jax.random.fold_in(jax.random.key(self.sampling.seed), len(text))
            new = self._write(params, jnp.asarray([seen], jnp.int32), key, count=count)
            text += np.asarray(new)[:, 0].tolist()
        return text[-tokens:] if tokens else []

    @cached_property
    def _write(self) -> Callable[..., Array]:
        """(params, prompt[B, T], key, count=...) -> ids[count, B]; compiled once for each shape."""
        specs = (self.program.states.specs["params"], P(), P())

        def write(params: Params, prompt_BT: Array, key: Array, *, count: int) -> Array:
            body = partial(self._run, count=count)
            return jax.shard_map(
                body, mesh=self.program.mesh, in_specs=specs, out_specs=P(), check_vma=True
            )(params, prompt_BT, key)

        return jax.jit(write, static_argnames="count")

    def _run(self, params: Params, prompt_BT: Array, key: Array, *, count: int) -> Array:
        """prompt[B, T] -> ids[count, B]: the prompt in one pass, then a token at a time."""
        passes, length = make_passes(self._resolved), prompt_BT.shape[1]
        params = self.program.states.to_device(params)
        params = passes.gathered(self._resolved.zero.begin_step(params, training=False))

        def forward(tokens_BT: Array, start: Array, state: Any) -> tuple[Array, Any]:
            position_T = start + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
            places = Places(jnp.zeros(tokens_BT.shape[0], jnp.int32), position_T, None)
            logits_BTV, state = passes.logits(params, {"tokens": tokens_BT}, places, state)
            ids_B = self._draw(logits_BTV[:, -1:], jax.random.fold_in(key, start))
            return as_same(ids_B), state  # typed as varying where ZeRO gathered the parameters

        def advance(carry: tuple[Array, Any], i: Array) -> tuple[tuple[Array, Any], Array]:
            token_B, state = carry
            return forward(token_B[:, None], length + i, state), token_B

        state = passes.empty_state(params, prompt_BT.shape[0])
        first = forward(prompt_BT, jnp.int32(0), state)
        return lax.scan(advance, first, jnp.arange(count, dtype=jnp.int32))[1]

    def _draw(self, logits_B1V: Array, key: Array) -> Array:
        """Logits of the next token, sharded over V -> its id, `[B]`, equal on every device."""
        logits_BV = self._resolved.form.axes.gather(logits_B1V, 2)[:, 0, : self.vocab_size]
        logits_BV = logits_BV.astype(jnp.float32)
        if self.sampling.temperature < GREEDY:
            return jnp.argmax(logits_BV, -1).astype(jnp.int32)
        number = min(self.sampling.top_k or self.vocab_size, self.vocab_size)
        logits_BK, ids_BK = lax.top_k(logits_BV, number)
        logits_BK -= logits_BK[:, :1]  # the largest, so that no quotient below overflows
        drawn_B1 = jax.random.categorical(key, logits_BK / self.sampling.temperature)[:, None]
        return jnp.take_along_axis(ids_BK, drawn_B1, axis=1)[:, 0].astype(jnp.int32)


def write_text(
    program: Program,
    params: Params,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    tokens: int,
    sampling: Sampling,
) -> str:
    """The prompt and the text that the model adds. An empty prompt starts a new document.

    Raises:
        UserError: the model's vocabulary lacks an id of the prompt.
    """
    family = program.config.model.family
    if not family_of(program.config.model).writes:
        raise UserError(f"model.family={family} writes no text; use a decoder, as gpt or llama")
    vocab_size = min(tokenizer.vocab_size, program.config.model.vocab_size or 0)
    ids = tokenizer.encode(prompt).tolist() or [tokenizer.end_of_document]
    if max(ids) >= vocab_size:
        raise UserError(
            f"the prompt {prompt!r} has id {max(ids)}, the model knows 0 to {vocab_size - 1}; it "
            "was trained on token files made with another tokenizer than data.tokenizer"
        )
    return prompt + tokenizer.decode(Generator(program, vocab_size, sampling)(params, ids, tokens))


def check_tokens(name: str, tokens: int) -> None:
    """Raises UserError for a number of tokens that nobody can wait for, or that is negative."""
    if not 0 <= tokens <= MOST_TOKENS:
        raise UserError(f"{name} {tokens}: write 0 tokens or more, up to {MOST_TOKENS}")


@checked("jaxptd.generate")
def generate(
    run_dir: str | Path,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = Sampling.temperature,
    top_k: int = Sampling.top_k,
    seed: int = 0,
    tp: int = 1,
    layout: Layout | None = None,
    platform: Literal["auto", "cpu"] = "auto",
) -> str:
    """The prompt, and the text that the model of a run directory adds to it.

    `jaxptd.load(run_dir)` restores a model once for several texts.

    >>> print(generate("runs/quickstart", "def ", tokens=100))  # doctest: +SKIP

    Args:
        run_dir: `train.run_dir` of the run, or a Hugging Face directory.
        prompt: text to continue; empty starts a document.
        tokens: to generate.
        temperature: of the draws; 0 takes the most likely token.
        top_k: draw from the k most likely tokens; 0 from all.
        seed: of the draws.
        tp: devices to hold the model on.
        layout: of more axes than tp.
        platform: as `train.platform`.

    Raises:
        UserError: there is no run, no good checkpoint, or too few devices.
    """
    check_tokens("tokens", tokens)
    sampling = Sampling(temperature, top_k, seed)
    layout = layout or Layout(tp=tp)
    program, params = load_model(Path(run_dir), layout=layout, platform=platform)
    tokenizer = tokenizer_of(program.config)
    return write_text(program, params, tokenizer, prompt=prompt, tokens=tokens, sampling=sampling)


def main(argv: Sequence[str] | None = None) -> int:
    """Generates text with the model of a run directory."""
    args = parser().parse_args(argv)
    if not 1 <= args.tokens <= MOST_TOKENS:
        raise UserError(f"--tokens {args.tokens}: write 1 token or more, up to {MOST_TOKENS}")
    text = generate(
        _run_dir(args),
        args.prompt,
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
        layout=Layout(**{axis: getattr(args, axis) for axis in AXES}),
        platform=args.platform,
    )
    if args.json:
        print(json.dumps({"prompt": args.prompt, "text": text}))
    else:
        text = text.removeprefix(args.prompt) if args.quiet else text
        print(printable(text, sys.stdout.encoding))
    return 0


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd generate --run-dir runs/quickstart --prompt 'class '",
        "jaxptd generate --config quickstart --tokens 500 --temperature 0.5 --seed 1",
    )
    made = Parser(prog="jaxptd generate", description=main.__doc__, examples=examples)
    add = made.add_argument
    help_text = "train.run_dir of the run, or a Hugging Face directory"
    add("--run-dir", type=path_option, metavar="D", help=help_text)
    add("--config", metavar="F", help="config of the run, instead of its directory")
    add("--prompt", default="", help="text to continue; empty starts a document")
    add("--tokens", type=int, default=200, metavar="N", help="to generate; default: 200")
    default = Sampling.temperature
    help_text = f"0 takes the most likely token; default: {default}"
    add("--temperature", type=float, default=default, metavar="X", help=help_text)
    help_text = f"0 draws from all tokens; default: {Sampling.top_k}"
    add("--top-k", type=int, default=Sampling.top_k, metavar="N", help=help_text)
    add("--seed", type=int, default=Sampling.seed, metavar="N", help="of the draws; default: 0")
    for axis in AXES:
        names = ("--tp", "--layout.tp") if axis == "tp" else (f"--layout.{axis}",)
        add(*names, dest=axis, type=int, default=1, metavar="N", help="devices; default: 1")
    help_text = "cpu simulates devices; default: auto"
    platforms = ("auto", "cpu")
    add("--platform", "--train.platform", choices=platforms, default="auto", help=help_text)
    add_words(made, json="prompt and text", quiet="print only what the model adds")
    return made


def _run_dir(args: Any) -> Path:
    """The directory that `--run-dir` or `--config` names."""
    if (args.run_dir is None) == (args.config is None):
        raise UserError("give --run-dir D, the directory of a run, or its --config F")
    run_dir: Path = args.run_dir or Path(load_config(args.config).train.run_dir)
    return run_dir


callable_module(__name__)
if __name__ == "__main__":
    run_command(main)
