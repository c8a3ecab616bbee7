"""A tiny decoder with distinct likelihoods on any layout, and its log-probabilities in numpy."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxptd.api import Run
from jaxptd.api.run import open_corpus
from jaxptd.api.whole_batches import WholeBatches
from jaxptd.commands.command_line import load_config
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.mesh import make_mesh
from jaxptd.params import shardings
from jaxptd.run.folder import RunDir
from jaxptd.step import Program

CONFIG = Path(__file__).parents[3] / "configs" / "test-tiny.yaml"
VOCAB, LONGEST = 260, 16


@functools.cache
def program(layout: str = "") -> Program:
    """The program for fields such as `dp=2 tp=2` (layout) and `model.window=4` (other sections)."""
    options = [f"--{'' if '.' in each else 'layout.'}{each}" for each in layout.split()]
    size = ["--train.micro_batches=1", f"--model.vocab_size={VOCAB}"]
    config = load_config(CONFIG, [*size, *options])
    return Program(config, make_mesh(config.layout))


@functools.cache
def params(layout: str = "") -> dict:
    """Initial parameters times 8, so that likelihoods differ; the same on any layout."""
    made, model = program(layout), " ".join(each for each in layout.split() if "." in each)
    if layout != model:
        stored = made.states.stored
        held = {name: stored[name].from_canonical(x) for name, x in params(model).items()}
        return jax.device_put(held, shardings(stored, made.mesh))
    larger = jax.jit(lambda params: jax.tree.map(lambda p: 8 * p, params))
    return larger(made.resolved.blueprint.init(0, mesh=made.mesh, dtype=jnp.float32))


class Letters(ByteTokenizer):
    """Reads bytes, but decodes each id to a different letter, so that all outputs differ."""

    def decode(self, ids: Any) -> str:
        return "".join(chr(0x100 + token) for token in ids)


def run(layout: str = "") -> Run:
    """A run that reads bytes and uses the parameters of `params`."""
    made, tokenizer = program(layout), Letters(["<s>"])
    opened = functools.partial(open_corpus, made.config, tokenizer)
    found = Run(made, tokenizer, opened, RunDir("none"), print)
    found.arrays = {"params": params(layout)}
    return found


@functools.cache
def whole_batches() -> WholeBatches:
    return WholeBatches(program())


def logs(text: list[int]) -> np.ndarray:
    """Log-probabilities `[T, V]` after each id of a text, on one device, in numpy."""
    padded = np.pad(np.array(text), (0, LONGEST - len(text)))  # one length, compiled once
    found = whole_batches().logits(params(), {"tokens": padded[None]})[0, : len(text)]
    logits = found.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
