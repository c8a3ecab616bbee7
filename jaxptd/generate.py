"""Generates text with a trained model and a cache of keys and values.

`python -m jaxptd.generate --run-dir runs/quickstart --prompt "def " --tokens 200` reads the newest
good checkpoint of a run. A text that fills the model's seq_length is continued from its last half.

Letters: B batch (one text), T position, V vocabulary, K most likely tokens.
"""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxptd.checkpoint import CheckpointError, Checkpoints
from jaxptd.checkpoint.canonical import abstract_canonical, params_from_canonical
from jaxptd.collectives import as_same
from jaxptd.config import Config
from jaxptd.data.tokenizers import Tokenizer, load_tokenizer
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.layers.dropout import Places
from jaxptd.layers.forms import for_decoding
from jaxptd.mesh import Layout, make_mesh
from jaxptd.params import Params
from jaxptd.run.checkpoints import saved_config
from jaxptd.run.devices import prepare
from jaxptd.run.progress import printable
from jaxptd.step import Program
from jaxptd.step.passes import make_passes
from jaxptd.step.resolved import Resolved, resolve

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
        config = self.program.config
        model, layout = dataclasses.replace(config.model, remat="none"), config.layout
        if layout.offload == "activations":  # nothing is kept
            layout = dataclasses.replace(layout, offload="none")
        config = dataclasses.replace(config, model=model, layout=layout)
        resolved = resolve(config, self.program.mesh)
        return dataclasses.replace(resolved, form=for_decoding(layout))

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

        def forward(tokens_BT: Array, start: Array, cache: Any) -> tuple[Array, Any]:
            position_T = start + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
            places = Places(jnp.zeros(tokens_BT.shape[0], jnp.int32), position_T, None)
            logits_BTV, cache = passes.logits(params, tokens_BT, places, cache)
            ids_B = self._draw(logits_BTV[:, -1:], jax.random.fold_in(key, start))
            return as_same(ids_B), cache  # typed as varying where ZeRO gathered the parameters

        def advance(carry: tuple[Array, Any], i: Array) -> tuple[tuple[Array, Any], Array]:
            token_B, cache = carry
            return forward(token_B[:, None], length + i, cache), token_B

        cache = passes.empty_cache(params, prompt_BT.shape[0])
        first = forward(prompt_BT, jnp.int32(0), cache)
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
    vocab_size = min(tokenizer.vocab_size, program.config.model.vocab_size or 0)
    ids = tokenizer.encode(prompt).tolist() or [tokenizer.end_of_document]
    if max(ids) >= vocab_size:
        raise UserError(
            f"the prompt {prompt!r} has id {max(ids)}, the model knows 0 to {vocab_size - 1}; it "
            "was trained on token files made with another tokenizer than data.tokenizer"
        )
    return prompt + tokenizer.decode(Generator(program, vocab_size, sampling)(params, ids, tokens))


def load_run(run_dir: Path, *, tp: int, platform: Any) -> tuple[Program, Params]:
    """Loads the model of a run's newest good checkpoint, on `tp` devices.

    Raises:
        UserError: there is no run, no good checkpoint, or too few devices.
    """
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=1)
    if not checkpoints.steps():
        raise UserError(
            f"{run_dir} holds no checkpoint; train with --train.run_dir {run_dir} first"
        )
    saved = _saved_config(checkpoints, run_dir)
    train = dataclasses.replace(
        saved.train, platform=platform, global_batch_size=1, micro_batches=1
    )
    # cuDNN's kernel has no cache, and products of a single token gain nothing from 8 bits.
    model = dataclasses.replace(saved.model, attention="xla", products="native")
    config = Config(model, Layout(tp=tp), saved.data, saved.optimizer, train, saved.checkpoint)
    prepare(config)
    program = Program(config, make_mesh(config.layout))
    target = abstract_canonical(program)
    found = checkpoints.restore_newest(target, report=_warn)
    if found is None:
        raise UserError(f"no checkpoint of {run_dir} can be read; all of them are damaged")
    return program, params_from_canonical(program, found[1])


def _saved_config(checkpoints: Checkpoints, run_dir: Path) -> Config:
    """The config in the newest readable manifest; all checkpoints of a run have the same model."""
    for step in reversed(checkpoints.steps()):
        with contextlib.suppress(CheckpointError):
            return saved_config(str(run_dir), checkpoints.description(step))
    raise UserError(f"no checkpoint of {run_dir} can be read; all of them are damaged")


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Generates text with the model of a run directory."""
    parser = Parser(prog="python -m jaxptd.generate", description=main.__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="train.run_dir of the run")
    parser.add_argument("--prompt", default="", help="text to continue; empty starts a document")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to generate")
    parser.add_argument(
        "--temperature",
        type=float,
        default=Sampling.temperature,
        help="0 takes the most likely token",
    )
    parser.add_argument("--top-k", type=int, default=Sampling.top_k, help="0 draws from all tokens")
    parser.add_argument("--seed", type=int, default=Sampling.seed)
    parser.add_argument("--tp", type=int, default=1, help="devices to hold the model on")
    parser.add_argument("--platform", choices=["auto", "cpu"], default="auto")
    args = parser.parse_args(argv)
    if args.tokens < 1:
        raise UserError(f"--tokens {args.tokens}: write 1 token or more")
    sampling = Sampling(args.temperature, args.top_k, args.seed)
    program, params = load_run(args.run_dir, tp=args.tp, platform=args.platform)
    tokenizer = load_tokenizer(program.config.data.tokenizer)
    text = write_text(
        program, params, tokenizer, prompt=args.prompt, tokens=args.tokens, sampling=sampling
    )
    print(printable(text, sys.stdout.encoding))
    return 0


if __name__ == "__main__":
    run_command(main)
