"""jaxptd's training steps are those of a reference in numpy, on one device and on layouts."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from one_device import FromZeros
from reference.families import PRESETS
from reference.layers import Options
from reference.training import Rule, Step, Training
from turns import slow

from jaxptd.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from jaxptd.mesh import Layout, make_mesh
from jaxptd.params import shardings

TOLERANCE = 1e-12  # of the norm of the difference, by that of the reference
FLOAT32 = 2.0**-22  # learning rates are float32
STEPS = 3  # a step of warm-up, the peak, and one of the decay
RULE = Rule(1e-2, 2, 4, 0.1, 0.8, 0.9, 1e-3, 0.15)
SEED = 2**32 - 5
VOCAB, BATCH = 13, 8
SIZES = {"hidden_size": 16, "num_heads": 4, "seq_length": 8, "ffn_hidden_size": 24}
Choice = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model: what its config says, and what the reference is told of it.

    Args:
        family: of the model.
        fields: of `ModelConfig`, beside the sizes.
        options: of the reference, beside the family's preset.
        apart: whether documents are kept apart.
    """

    family: str
    fields: Choice
    options: Choice = dataclasses.field(default_factory=dict)
    apart: bool = False

    def __str__(self) -> str:
        return " ".join([self.family, *(f"{k}={v}" for k, v in self.fields.items())])

    def config(self, layout: Layout) -> Config:
        """The config of this model on a layout, with micro-batches."""
        fields = {"num_layers": 2, **SIZES, "dropout": 0.2, "dtype": "float64", **self.fields}
        rule = OptimizerConfig(
            learning_rate=RULE.peak,
            warmup_steps=RULE.warmup,
            weight_decay=RULE.decay,
            beta1=RULE.beta1,
            beta2=RULE.beta2,
            epsilon=RULE.epsilon,
            grad_clip=RULE.clip,
        )
        return Config(
            ModelConfig(family=self.family, vocab_size=VOCAB, **fields),
            layout,
            data=DataConfig(documents="apart" if self.apart else "joined"),
            optimizer=rule,
            train=TrainConfig(
                steps=RULE.steps, seed=SEED, global_batch_size=BATCH, micro_batches=2
            ),
        )

    @property
    def known(self) -> Options:
        """The model as the reference knows it."""
        sizes = {"layers": 2, "decoder_layers": 0, "head_size": 4, "dropout": 0.2}
        return Options(**sizes | PRESETS[self.family] | self.options)


GPT = Case(
    "gpt",
    {"tie_embeddings": False, "z_loss": 0.125, "logit_softcap": 2.0, "max_positions": 12},
    {"tied": False, "z_loss": 0.125, "cap": 2.0},
    apart=True,
)
QWEN = Case(
    "qwen3",
    {"num_kv_heads": 2, "head_size": 6, "linear_bias": "qkv", "window": 5, "rope_theta": 20.0},
    {"head_size": 6, "window": 5, "theta": 20.0},
    apart=True,
)
BERT = Case("bert", {})
T5 = Case(
    "t5",
    {
        **{"decoder_seq_length": 16, "num_decoder_layers": 3, "gated": True, "start_token": 2},
        **{"relative_buckets": 8, "relative_distance": 7},
    },
    {
        **{"decoder_layers": 3, "gated": True, "start": 2, "buckets": 8, "distance": 7},
        "output_scale": SIZES["hidden_size"] ** -0.5,
    },
)


def batch(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A random one, with all that a batch of the family can have."""
    T, long = SIZES["seq_length"], case.fields.get("decoder_seq_length", SIZES["seq_length"])
    ids = lambda length: rng.integers(0, VOCAB, (BATCH, length))  # noqa: E731
    text = np.arange(T) < rng.integers(T // 2, T + 1, (BATCH, 1))
    targets = np.where(rng.random((BATCH, long)) < 0.3, -1, ids(long))
    fields: dict[str, Any] = {"targets": targets}
    if case.family == "t5":
        fields |= {"source": ids(T), "source_mask": text}
    elif case.family == "bert":
        fields |= {"tokens": ids(T), "mask": text, "token_types": rng.integers(0, 2, (BATCH, T))}
        fields |= {"next_sentence": rng.integers(0, 2, BATCH)}
    else:
        fields |= {"tokens": ids(T)}
    if case.apart:
        fields["segments"] = (rng.random((BATCH, T)) < 0.3).cumsum(1)
    return {name: x.astype(np.int32) for name, x in fields.items()}


def start(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Parameters of which none is zero, nor any norm's weight near it."""
    rng = np.random.default_rng(3)
    return {
        name: 0.1 * rng.standard_normal(shapes[name]) + name.endswith("norm.w")
        for name in sorted(shapes)
    }


def batches(case: Case) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(4)
    return [batch(case, rng) for _ in range(STEPS)]


def found(case: Case, layout: Layout) -> list[Step]:
    """Steps of jaxptd, in canonical form."""
    program = FromZeros(case.config(layout), make_mesh(layout))
    stored = program.states.stored
    begin = start({name: info.shape for name, info in program.infos.items()})
    placed = jax.jit(lambda p: {name: stored[name].from_canonical(x) for name, x in p.items()})
    params = jax.tree.map(np.asarray, placed(begin))
    state = program.init_state()
    state = {**state, "params": jax.device_put(params, shardings(stored, program.mesh))}
    canonical = jax.jit(program.canonical)
    steps = []
    for each in batches(case):
        state, metrics, grads = program.step_with_gradients(state, each)
        numbers = [float(metrics[name]) for name in ("loss", "grad_norm", "learning_rate")]
        arrays = [jax.tree.map(np.asarray, canonical(x)) for x in (grads, state["params"])]
        steps.append(Step(*numbers, *arrays))
    return steps


@functools.cache
def expected(case: Case, shapes: tuple, rates: tuple[float, ...]) -> list[Step]:
    """Steps of the reference. rates: its learning rates as jaxptd rounds them."""
    training = Training(case.family, case.known, RULE, SEED, start(dict(shapes)))
    return [
        training.step(each, rate) for each, rate in zip(batches(case), rates, strict=True)
    ]


def far(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference / norm of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def differences(case: Case, layout: Layout) -> dict[str, float]:
    """Relative differences between jaxptd's steps and the reference's, by what differs."""
    with jax.enable_x64(True):
        steps = found(case, layout)
    shapes = tuple((name, g.shape) for name, g in steps[0].gradients.items())
    wanted = expected(case, shapes, tuple(step.rate for step in steps))
    every = {}
    for number, (step, want) in enumerate(zip(steps, wanted, strict=True)):
        assert step.rate == pytest.approx(want.rate, rel=FLOAT32)
        assert want.norm > 1.1 * RULE.clip  # or nothing is clipped
        every[f"loss {number}"] = abs(step.loss / want.loss - 1)
        every[f"norm {number}"] = abs(step.norm / want.norm - 1)
        assert step.gradients.keys() == want.gradients.keys()
        for name in want.gradients:
            every[f"gradient {name} {number}"] = far(step.gradients[name], want.gradients[name])
            every[f"parameter {name} {number}"] = far(step.params[name], want.params[name])
    return every


def hold(case: Case, layout: Layout) -> None:
    """Asserts that all are equal."""
    found = differences(case, layout)
    assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize("case", [GPT, QWEN, BERT, T5], ids=str)
def test_one_device_steps_as_the_reference(case: Case) -> None:
    hold(case, Layout())
