"""The tiny model that tests share, so that they also share compiled programs."""

import dataclasses
from typing import Any

import numpy as np

from jaxptd.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Batch, Program

VOCAB = 13  # odd, so that every tp pads it
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, seq_length=8, vocab_size=VOCAB)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=3)
SEQUENCE_PARALLEL = Layout(dp=2, tp=4, sequence_parallel=True)


def config(layout: Layout, *, micro_batches: int = 2, **model: Any) -> Config:
    """A batch of eight; fields of the model can be set."""
    train = TrainConfig(steps=30, global_batch_size=8, micro_batches=micro_batches)
    sizes = dataclasses.replace(MODEL, **model)
    return Config(model=sizes, layout=layout, optimizer=OPTIMIZER, train=train)


def program(layout: Layout, *, micro_batches: int = 2, **model: Any) -> Program:
    return Program(config(layout, micro_batches=micro_batches, **model), make_mesh(layout))


def batch(seed: int = 0) -> Batch:
    """Random tokens, as numpy arrays."""
    rows = (
        np.random.default_rng(seed).integers(0, VOCAB, (8, MODEL.seq_length + 1)).astype(np.int32)
    )
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
