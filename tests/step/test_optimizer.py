"""Learning rate, weight decay, clipping and norm, compared with numpy and optax."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.analysis.verification import verify
from jaxptd.commands.command_line import load_config
from jaxptd.config import OptimizerConfig
from jaxptd.errors import UserError
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.optimizers.moments import MOMENTS
from jaxptd.params import ParamInfo
from jaxptd.step import Program
from jaxptd.step.optimizer import clip, global_norm, learning_rate, make_optimizer

CONFIG = Path(__file__).parents[2] / "configs" / "test-tiny.yaml"
PEAK = 1e-2
WARMUP, STEPS = 4, 25


def rates(decay: str, *, warmup: int = WARMUP, steps: int = STEPS, **fields: Any) -> np.ndarray:
    """The learning rate of every step."""
    config = OptimizerConfig(learning_rate=PEAK, warmup_steps=warmup, decay=decay, **fields)
    rate = jax.vmap(lambda step: learning_rate(config, step=step, steps=steps))
    return np.asarray(rate(jnp.arange(steps, dtype=jnp.int32)))


def test_warm_up_is_linear_and_its_first_step_is_not_zero():
    expected = [PEAK * fraction for fraction in (0.25, 0.5, 0.75, 1.0)]
    for decay in ("constant", "linear", "cosine"):
        np.testing.assert_allclose(rates(decay)[:WARMUP], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("fraction", "decay_steps", "warmup"),
    [(0.16, None, 4), (0.13, None, 4), (0.0, None, 0), (0.07, 100, 7), (0.04, 100, 4)],
)
def test_a_fraction_of_warm_up_is_rounded_up_to_whole_steps(fraction, decay_steps, warmup):
    given = {"decay": "linear", "decay_steps": decay_steps}
    found = rates(warmup=OptimizerConfig().warmup_steps, warmup_fraction=fraction, **given)
    np.testing.assert_array_equal(found, rates(warmup=warmup, **given))


def test_decays_follow_their_formulas_down_to_a_tenth():
    progress = np.arange(STEPS - WARMUP) / (STEPS - WARMUP - 1)
    linear = PEAK * (1 - 0.9 * progress)
    cosine = PEAK * (0.1 + 0.9 * 0.5 * (1 + np.cos(math.pi * progress)))
    np.testing.assert_allclose(rates("linear")[WARMUP:], linear, rtol=1e-6)
    np.testing.assert_allclose(rates("cosine")[WARMUP:], cosine, rtol=1e-5)
    np.testing.assert_allclose(rates("constant")[WARMUP:], PEAK, rtol=1e-6)
    for decay in ("linear", "cosine"):
        assert rates(decay)[-1] == pytest.approx(PEAK / 10, rel=1e-6)


def test_the_ends_of_the_schedule():
    assert rates("cosine", warmup=0)[0] == pytest.approx(PEAK)
    assert rates("linear", warmup=0, steps=1)[0] == pytest.approx(PEAK)
    all_warm_up = rates("cosine", warmup=10, steps=5)
    np.testing.assert_allclose(all_warm_up, PEAK * np.arange(1, 6) / 10, rtol=1e-6)


def test_beyond_its_last_step_the_rate_stays_at_a_tenth():
    for decay in ("linear", "cosine"):
        config = OptimizerConfig(learning_rate=PEAK, warmup_steps=WARMUP, decay=decay)
        rate = learning_rate(config, step=jnp.int32(10 * STEPS), steps=STEPS)
        assert float(rate) == pytest.approx(PEAK / 10)


def test_wsd_stays_at_the_peak_and_falls_over_its_last_steps():
    found = rates("wsd", cooldown_steps=5)
    np.testing.assert_allclose(found[WARMUP : STEPS - 5], PEAK, rtol=1e-6)
    falling = PEAK * (1 - 0.9 * np.arange(1, 6) / 5)
    np.testing.assert_allclose(found[STEPS - 5 :], falling, rtol=1e-6)
    np.testing.assert_array_equal(rates("wsd", steps=50), rates("wsd", steps=50, cooldown_steps=5))
    long = rates("wsd", cooldown_steps=100)  # longer than what remains after the warm-up
    np.testing.assert_allclose(long, rates("linear"), rtol=1e-6)


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_a_decay_that_ends_at_a_step_of_its_own_does_not_know_how_long_the_run_is(decay):
    expected = rates(decay)
    for steps in (10, 40):
        found = rates(decay, steps=steps, decay_steps=STEPS)
        np.testing.assert_array_equal(found[:STEPS], expected[:steps])
        np.testing.assert_allclose(found[STEPS:], PEAK / 10, rtol=1e-6)


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_a_decay_ends_at_the_rate_that_is_asked_for(decay):
    assert rates(decay, min_learning_rate=PEAK / 4)[-1] == pytest.approx(PEAK / 4)
    assert rates(decay, min_learning_rate=0.0)[-1] == 0.0
    np.testing.assert_allclose(rates(decay, min_learning_rate=PEAK)[WARMUP:], PEAK, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"decay": "constant", "decay_steps": 5}, "decay_steps has no effect with optimizer.decay"),
        ({"decay": "constant", "min_learning_rate": 1e-5}, "min_learning_rate has no effect"),
        ({"cooldown_steps": 5}, "cooldown_steps has no effect with optimizer.decay=cosine"),
        ({"name": "lion", "epsilon": 1e-6}, "epsilon has no effect with optimizer.name=lion"),
        ({"name": "sgd", "beta2": 0.5}, "beta2 has no effect with optimizer.name=sgd"),
        ({"min_learning_rate": 1.0}, "is above optimizer.learning_rate=0.0003, the peak"),
        ({"min_learning_rate": -1.0}, "optimizer.min_learning_rate=-1.0 must be a number, 0 or"),
        ({"momentum": 0.9}, "momentum has no effect with optimizer.name=adamw"),
        ({"name": "adafactor", "beta1": 0.5}, "beta1 has no effect with optimizer.name=adafactor"),
        ({"warmup_fraction": 0.1, "warmup_steps": 5}, "both say how long warm-up is; leave one"),
        ({"warmup_fraction": 1.0}, "optimizer.warmup_fraction=1.0 must be in"),
        ({"epsilon": 0.0}, "optimizer.epsilon=0.0 must be a number above 0"),
        ({"decay_steps": 0}, "optimizer.decay_steps=0 must be a number above 0"),
        ({"name": "adam"}, "optimizer.name=adam: use one of adamw, lion, sgd, muon, "),
    ],
)
def test_a_field_that_is_not_read_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        OptimizerConfig(**fields)


# ---- weight decay ---------------------------------------------------------------------------


@functools.cache
def quick() -> Program:
    config = load_config(CONFIG, ["--model.vocab_size", "257", "--model.num_layers", "1"])
    return Program(config, make_mesh(config.layout))


def test_weight_decay_is_on_matrices_only():
    decayed = {name for name, info in quick().infos.items() if info.decay}
    others = set(quick().infos) - decayed
    assert {name.rpartition(".")[2] for name in decayed} == {"w", "table"}
    assert others == {name for name in quick().infos if name.endswith(".b") or "norm" in name}
    assert "blocks.mlp.up.w" in decayed
    assert "norm.w" in others


def test_without_gradients_only_weight_decay_moves_parameters():
    infos = quick().infos
    params = {name: np.full(info.stored_shape, 2.0, np.float32) for name, info in infos.items()}
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.25), infos)
    zero = jax.tree.map(np.zeros_like, params)
    direction, _ = jax.jit(optimizer.update)(zero, optimizer.init(params), params)
    for name, info in infos.items():
        np.testing.assert_array_equal(direction[name], 0.5 if info.decay else 0.0, err_msg=name)


# ---- clipping and the norm ------------------------------------------------------------------


def test_clip_scales_to_the_limit_and_leaves_smaller_gradients_alone():
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    norm = jnp.float32(5.0)
    clipped = clip(grads, norm, 1.0)
    np.testing.assert_allclose(clipped["a"], [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], [[0.8]], rtol=1e-6)
    for limit in (5.0, 6.0, 0.0):  # 0 never clips
        same = clip(grads, norm, limit)
        assert all(np.array_equal(same[name], grads[name]) for name in grads)


def test_clip_of_no_gradient_at_all_is_zero():
    zero = clip({"a": jnp.zeros(3)}, jnp.float32(0.0), 1.0)
    np.testing.assert_array_equal(zero["a"], 0.0)


def test_the_norm_counts_every_element_once_whatever_is_cut_or_copied():
    mesh = make_mesh(Layout(dp=2, tp=4))
    specs = {
        "copied": P(None),
        "over_tp": P(None, Axis.TP),
        "over_dp": P(Axis.DP, None),
        "over_both": P(Axis.TP, Axis.DP),
        "over_both_at_once": P((Axis.DP, Axis.TP)),
    }
    shapes = {"copied": (5,), "over_both_at_once": (16,)}
    rng = np.random.default_rng(0)
    grads = {
        name: rng.standard_normal(shapes.get(name, (4, 8))).astype(np.float32) for name in specs
    }
    infos = {
        name: ParamInfo(g.shape, g.shape, specs[name], decay=True) for name, g in grads.items()
    }
    norm = jax.shard_map(
        lambda g: global_norm(g, infos), mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=True
    )
    expected = np.linalg.norm(np.concatenate([g.ravel() for g in grads.values()]))
    assert float(jax.jit(norm)(grads)) == pytest.approx(float(expected), rel=1e-6)


# ---- directions -----------------------------------------------------------------------------

REFERENCES = {
    "adamw": lambda c, **decay: optax.adamw(c.learning_rate, c.beta1, c.beta2, c.epsilon, **decay),
    "lion": lambda c, **decay: optax.lion(c.learning_rate, c.beta1, c.beta2, **decay),
    "sgd": lambda c, **decay: optax.chain(
        optax.trace(c.beta1), optax.add_decayed_weights(**decay), optax.scale(-c.learning_rate)
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_three_updates_are_optax_s(name):
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 8), "b": (8,)}
    infos = {n: ParamInfo(s, s, P(), decay=n == "w") for n, s in shapes.items()}
    config = OptimizerConfig(name=name, learning_rate=PEAK, weight_decay=0.25)
    ours = make_optimizer(config, infos)
    theirs = REFERENCES[name](config, weight_decay=0.25, mask={"w": True, "b": False})
    found = expected = {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
    state, expected_state = ours.init(found), theirs.init(expected)
    moments = [x for x in jax.tree.leaves(state) if x.ndim]
    kept = MOMENTS[name].kept
    assert len(moments) == sum(len(kept(info)) for info in infos.values())
    for _ in range(3):
        grads = {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
        direction, state = ours.update(grads, state, found)
        found = {n: p - config.learning_rate * direction[n] for n, p in found.items()}
        updates, expected_state = theirs.update(grads, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        for n in shapes:
            np.testing.assert_allclose(found[n], expected[n], rtol=1e-5, atol=1e-7, err_msg=n)


PLACES = [
    slow(Layout(dp=2, tp=2, zero=3)),
    slow(Layout(dp=2, row=2, col=2, zero=1, offload="optimizer")),
    slow(Layout(pp=2, dp=2, schedule="zb-h1", zero=2)),
    slow(Layout(cp=2, tp=2, sequence_parallel=True)),
]


@pytest.mark.parametrize("name", [slow("sgd"), "lion"])
@pytest.mark.parametrize("layout", PLACES, ids=str)
def test_every_layout_takes_the_step_of_one_device(layout, name):
    config = tiny.config(layout, dropout=0.1)
    optimizer = OptimizerConfig(name=name, learning_rate=PEAK, warmup_steps=3)
    with jax.enable_x64(True):
        found = verify(dataclasses.replace(config, optimizer=optimizer), dtype="float64")
    assert found.wrong == []


# ---- the whole step -------------------------------------------------------------------------


@pytest.mark.slow
def test_three_steps_are_those_of_optax_adamw():
    program = quick()
    config = program.config.optimizer
    steps = program.config.train.steps
    reference = optax.chain(
        optax.clip_by_global_norm(config.grad_clip),
        optax.adamw(
            lambda step: learning_rate(config, step=step, steps=steps),
            config.beta1,
            config.beta2,
            weight_decay=config.weight_decay,
            mask={name: info.decay for name, info in program.infos.items()},
        ),
    )

    @jax.jit
    def advance(grads, params, state):
        updates, state = reference.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    tokens = np.random.default_rng(0).integers(0, 257, (3, 8, 17)).astype(np.int32)
    state = program.init_state()
    expected = state["params"]
    expected_state = reference.init(expected)
    for rows in tokens:
        batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
        state, metrics, grads = program.step_with_gradients(state, batch)
        norm = np.linalg.norm(np.concatenate([np.ravel(g) for g in grads.values()]))
        assert float(metrics["grad_norm"]) == pytest.approx(float(norm), rel=1e-6)
        expected, expected_state = advance(grads, expected, expected_state)
    for name, value in expected.items():
        np.testing.assert_allclose(state["params"][name], value, atol=1e-6, err_msg=name)
