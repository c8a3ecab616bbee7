"""The tiny model that tests share, so that they also share compiled programs."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxptd.config import (
    Config,
    DataConfig,
    Documents,
    Images,
    ModelConfig,
    OptimizerConfig,
    OptimizerName,
    TrainConfig,
    with_fields,
)
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Batch, Program, State
from jaxptd.step.state import new_guard

VOCAB = 13  # odd, so that every tp pads it
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, seq_length=8, vocab_size=VOCAB)
# An encoder-decoder with two different lengths, both beyond the distance where biases begin to be
# shared, and a different number of decoder layers.
T5 = {
    "family": "t5",
    "seq_length": 16,
    "encoder_decoder.seq_length": 8,
    "encoder_decoder.num_layers": 3,
    "encoder_decoder.relative_buckets": 8,
    "encoder_decoder.relative_distance": 7,
}
# Four experts: two per device with ep=2, one with ep=4.
MOE = {
    "family": "mixtral",
    "num_kv_heads": 2,
    "ffn_hidden_size": 8,
    "tie_embeddings": False,
    "moe.num_experts": 4,
    "moe.top_k": 2,
}
# Latent vectors and values of odd widths; keys are wider than values.
LATENT = {
    "family": "deepseek_v3",
    "moe.num_experts": 4,
    "moe.top_k": 2,
    "moe.ffn_hidden_size": 8,
    "moe.shared_ffn_hidden_size": 8,
    "moe.num_groups": 2,
    "moe.top_groups": 1,
    "moe.first_dense": 0,
    "latent.q_rank": 10,
    "latent.kv_rank": 6,
    "latent.nope_size": 5,
    "latent.rope_size": 2,
    "latent.value_size": 3,
}
# Images whose last level is one window, and 3 heads that no tp divides.
SWIN = ModelConfig(
    family="swin-unet",
    hidden_size=6,
    num_heads=3,
    images=Images(
        size=16,
        channels=2,
        classes=3,
        patch=2,
        window=4,
        depths=(4, 2),
        decoder_depths=(2,),
        dice="image",
    ),
)
ENCODER = with_fields(SWIN, {"family": "swin", "images.decoder_depths": None, "images.dice": None})
BASES = {"swin-unet": SWIN, "swin": ENCODER}
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=3)
SEQUENCE_PARALLEL = Layout(dp=2, tp=4, sequence_parallel=True)
CONTEXT_PARALLEL = Layout(dp=2, cp=2, tp=2, sequence_parallel=True)


def config(
    layout: Layout,
    *,
    batch: int = 8,
    micro_batches: int = 2,
    documents: Documents = "joined",
    restart_positions: bool = False,
    optimizer: OptimizerName = "adamw",
    ema_decay: float = 0.0,
    rates: tuple[tuple[str, float], ...] = (),
    frozen: tuple[str, ...] = (),
    **model: Any,
) -> Config:
    """The tiny model's config; `model` sets fields of the model, such as `images.size`."""
    train = TrainConfig(steps=30, global_batch_size=batch, micro_batches=micro_batches)
    sizes = with_fields(BASES.get(model.get("family"), MODEL), model)
    data = DataConfig(documents=documents, restart_positions=restart_positions)
    fields: Any = {"name": optimizer, "ema_decay": ema_decay, "rates": dict(rates) or None}
    fields["frozen"] = tuple(frozen) or None
    rule = dataclasses.replace(OPTIMIZER, **fields)
    return Config(model=sizes, layout=layout, data=data, optimizer=rule, train=train)


class FromZeros(Program):
    """A program whose initial state is zeros, except its guard, so nothing has to be compiled."""

    def init_state(self) -> State:
        start = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.abstract_state)
        start["guard"] = jax.tree.map(np.asarray, new_guard(self.resolved.model.dtype))
        return jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), start, self.abstract_state)


class Drawn(FromZeros):
    """A program whose initial parameters are those of `random_params`, without loads of experts."""

    def init_state(self) -> State:
        stored = self.states.stored
        start = {n: x * (not self.infos[n].counts) for n, x in random_params(self).items()}
        make = jax.jit(lambda start: {n: stored[n].from_canonical(x) for n, x in start.items()})
        made = jax.tree.map(np.asarray, make(start))  # sharded without a program
        state = super().init_state()
        params = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), made, state["params"])
        return {**state, "params": params}


def random_params(program: Program) -> dict[str, np.ndarray]:
    """Canonical parameters around 0, scales of norms around 1: the same for every layout."""
    draw, wide = np.random.default_rng(1), program.resolved.master_dtype
    return {
        name: (0.1 * draw.normal(size=info.shape) + name.endswith("norm.w")).astype(wide)
        for name, info in program.infos.items()
    }


def program(layout: Layout, **choices: Any) -> Program:
    """The program of `config(layout, **choices)`."""
    return Drawn(config(layout, **choices), make_mesh(layout))


def batch(seed: int = 0) -> Batch:
    """Eight sequences of random tokens, as numpy arrays."""
    rows = (
        np.random.default_rng(seed).integers(0, VOCAB, (8, MODEL.seq_length + 1)).astype(np.int32)
    )
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
