"""A tiny decoder whose likelihoods differ, on any layout, and its log-probabilities by numpy."""

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
    """Fields of the layout, as in `dp=2 tp=2`, and others by section, as in `model.window=4`."""
    options = [f"--{'' if '.' in each else 'layout.'}{each}" for each in layout.split()]
    size = ["--train.micro_batches=1", f"--model.vocab_size={VOCAB}"]
    config = load_config(CONFIG, [*size, *options])
    return Program(config, make_mesh(config.layout))


@functools.cache
def params(layout: str = "") -> dict:
    """Parameters 8 times larger than initial ones, so that likelihoods differ; on any layout."""
    made, model = program(layout), " ".join(each for each in layout.split() if "." in each)
    if layout != model:
        stored = made.states.stored
        held = {name: stored[name].from_canonical(x) for name, x in params(model).items()}
        return jax.device_put(held, shardings(stored, made.mesh))
    larger = jax.jit(lambda params: jax.tree.map(lambda p: 8 * p, params))
    return larger(made.resolved.blueprint.init(0, mesh=made.mesh, dtype=jnp.float32))


class Letters(ByteTokenizer):
    """Bytes, and a letter for every id, so that whatever a model generates can be told apart."""

    def decode(self, ids: Any) -> str:
        return "".join(chr(0x100 + token) for token in ids)


def run(layout: str = "") -> Run:
    """A run that reads bytes, with the parameters of `params`."""
    made, tokenizer = program(layout), Letters(["<s>"])
    opened = functools.partial(open_corpus, made.config, tokenizer)
    found = Run(made, tokenizer, opened, RunDir("none"), print)
    found.arrays = {"params": params(layout)}
    return found


@functools.cache
def whole_batches() -> WholeBatches:
    return WholeBatches(program())


def logs(text: list[int]) -> np.ndarray:
    """Log-probabilities `[T, V]` after each of a text's ids, one device, by numpy."""
    padded = np.pad(np.array(text), (0, LONGEST - len(text)))  # one length, compiled once
    found = whole_batches().logits(params(), {"tokens": padded[None]})[0, : len(text)]
    logits = found.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
