"""jaxptd's training steps equal a numpy reference, on one device and on layouts."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from reference.cases import (
    AHEAD,
    BERT,
    GATED_SHARE,
    GEMMA2,
    GEMMA3,
    GPT,
    GPT_OSS,
    HEADS,
    LATENT,
    LATENT_KEYS,
    LLAMA_3,
    MIXTRAL,
    MORE,
    PATTERN,
    QWEN,
    RULE,
    SEED,
    SIGMOIDS,
    SINKS,
    STEPS,
    T5,
    WITH_EXPERTS,
    YARN,
    Case,
    batches,
    start,
)
from reference.training import Step, Training
from turns import slow

from jaxptd.mesh import Layout, make_mesh

TOLERANCE = 1e-12  # relative, by norms
FLOAT32 = 2.0**-22  # learning rates are float32


def found(case: Case, layout: Layout) -> list[Step]:
    """jaxptd's steps, in canonical form."""
    program = tiny.FromZeros(case.config(layout), make_mesh(layout))
    stored = program.states.stored
    placed = jax.jit(lambda p: {name: stored[name].from_canonical(x) for name, x in p.items()})
    params = jax.tree.map(np.asarray, placed(start(case)))
    state = {**program.init_state(), "params": params}
    state = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), state, program.abstract_state
    )
    canonical = jax.jit(program.canonical)
    steps = []
    for each in batches(case):
        state, metrics, grads = program.step_with_gradients(state, each)
        numbers = [float(metrics[name]) for name in ("loss", "grad_norm", "learning_rate")]
        arrays = [jax.tree.map(np.asarray, canonical(x)) for x in (grads, state["params"])]
        steps.append(Step(*numbers, *arrays))
    return steps


@functools.cache
def expected(case: Case, rates: tuple[float, ...]) -> list[Step]:
    """The reference's steps. rates: learning rates, as jaxptd rounds them."""
    training = Training(case.family, case.known, case.rule, SEED, start(case))
    return [training.step(each, rate) for each, rate in zip(batches(case), rates, strict=True)]


def far(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference, divided by the norm of the expected value."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def differences(case: Case, layout: Layout) -> dict[str, float]:
    """Relative differences between jaxptd's and the reference's steps, by quantity."""
    with jax.enable_x64(True):
        steps = found(case, layout)
    wanted = expected(case, tuple(step.rate for step in steps))
    every = {}
    for number, (step, want) in enumerate(zip(steps, wanted, strict=True)):
        assert step.rate == pytest.approx(want.rate, rel=FLOAT32)
        assert want.norm > 1.1 * case.rule.clip  # otherwise nothing is clipped
        every[f"loss {number}"] = abs(step.loss / want.loss - 1)
        every[f"norm {number}"] = abs(step.norm / want.norm - 1)
        assert step.gradients.keys() == want.gradients.keys()
        for name in want.gradients:
            every[f"gradient {name} {number}"] = far(step.gradients[name], want.gradients[name])
            every[f"parameter {name} {number}"] = far(step.params[name], want.params[name])
    return every


def hold(case: Case, layout: Layout) -> None:
    """Asserts that all quantities agree."""
    found = differences(case, layout)
    assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize(
    "case",
    [
        *(slow(each) for each in (GPT, QWEN, BERT, T5, YARN, LLAMA_3, GEMMA3)),
        PATTERN,
        SINKS,
        GEMMA2,
        HEADS,
    ],
    ids=str,
)
def test_one_device_steps_as_the_reference(case: Case) -> None:
    hold(case, Layout())


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda case: f"{case} {case.fields}")
def test_other_options_step_as_the_reference(case: Case) -> None:
    hold(case, Layout())


@pytest.mark.parametrize("case", [LATENT, slow(LATENT_KEYS)], ids=str)
def test_latent_attention_steps_as_the_reference(case: Case) -> None:
    hold(case, Layout())


@pytest.mark.parametrize("case", [AHEAD[0], *map(slow, AHEAD[1:])], ids=str)
def test_several_tokens_ahead_step_as_the_reference(case: Case) -> None:
    hold(case, Layout())


@pytest.mark.parametrize("case", [SIGMOIDS, *map(slow, WITH_EXPERTS[1:])], ids=str)
def test_experts_step_as_the_reference(case: Case) -> None:
    """Loads are compared with the gradients, and must match to the last token."""
    hold(case, Layout())


def test_an_expert_without_tokens_decays_as_all_do() -> None:
    """An idle expert has no gradient, but moments and weight decay still move it."""
    first, second, _ = expected(SIGMOIDS, tuple(RULE.rate(step) for step in range(STEPS)))
    loads, after = (each.gradients["blocks_1.mlp.router.load_bias"][0] for each in (first, second))
    idle = np.flatnonzero((loads > 0) & (after == 0))
    assert len(idle) > 0
    for name in ("blocks_1.mlp.up.w", "blocks_1.mlp.down.w"):
        assert not second.gradients[name][0, idle].any()
        moved = second.params[name] - first.params[name]
        decay = -RULE.rate(1) * RULE.decay * first.params[name]
        assert (moved != 0)[0, idle].all()
        assert far(moved[0, idle], decay[0, idle]) > 0.1  # moments also contribute


LAYOUTS = (
    Layout(dp=2, ep=2, tp=2, sequence_parallel=True),
    Layout(row=2, col=2),
    Layout(cp=2, tp=2, zero=3),
    Layout(pp=2, ep=2),
    Layout(row=2, col=2, attention2d="blocks"),
    Layout(dp=2, cp=4, ring="rsa", zero=2),
    Layout(pp=2, cp=2, schedule="zb-h1"),
)

SHARED_SEQUENCES = (
    Layout(pp=2, cp=2, tp=2, ring="gather"),
    Layout(cp=2, ulysses=2, tp=2, zero=2),
)
OF_GEMMA = (
    *LAYOUTS,
    *SHARED_SEQUENCES,
    Layout(tp=4, sequence_parallel=True),
    Layout(cp=4),
    Layout(zero=3, dp=4),
)
EXPERT_LAYOUTS = (
    Layout(ep=2, tp=2, sequence_parallel=True, zero=1),
    Layout(ep=4, zero=3),
    Layout(ep=2, cp=2, zero=2),
    Layout(pp=2, dp=2, ep=2, schedule="zb-h1"),
    Layout(ep=2, ulysses=2, tp=2),
)
LATENT_LAYOUTS = (
    Layout(ep=2, tp=2, sequence_parallel=True),
    Layout(cp=2, tp=2, zero=3),
    Layout(tp=2, sequence_parallel=True, collective_matmul=True),
    Layout(cp=2, tp=2, sequence_parallel=True, ring="gather"),
    Layout(pp=2, cp=2, tp=2, schedule="zb-v"),
    Layout(dp=2, cp=4, ring="rsa", zero=2),
    Layout(ulysses=2, tp=2, zero=1),
)
ABSORBED = tuple(
    dataclasses.replace(each, latent_products="absorbed")
    for each in (
        Layout(cp=2, tp=2, sequence_parallel=True),
        Layout(),
        *LATENT_LAYOUTS,
        Layout(cp=2, ulysses=2, ring="blockwise"),
        Layout(cp=2, ulysses=2, ring="rsa"),
    )
)
OF_GPT_OSS = (
    *EXPERT_LAYOUTS,
    Layout(tp=4),
    Layout(cp=4),
    Layout(cp=2, tp=2, ring="gather", zero=3),
    Layout(ep=2, tp=2, experts="whole"),
    Layout(ep=2, tp=2, sequence_parallel=True, collective_matmul=True),
    Layout(pp=2, tp=2, stage_layers=(1, 0, 1, 1), schedule="zb-v"),
)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        (GPT, LAYOUTS[0]),
        *(slow(case, each) for case in (GPT, QWEN, BERT, T5) for each in LAYOUTS[case is GPT :]),
        *(slow(case, each) for case in (YARN, LLAMA_3) for each in LAYOUTS[:3]),
        *(slow(PATTERN, each) for each in (*LAYOUTS, *SHARED_SEQUENCES)),
        (SINKS, LAYOUTS[-1]),
        *(
            slow(SINKS, each)
            for each in (*LAYOUTS[:-1], *SHARED_SEQUENCES)
            if not each.unfused_attention
        ),
        *(slow(GEMMA2, each) for each in OF_GEMMA if not each.unfused_attention),
        *(slow(HEADS, each) for each in OF_GEMMA if not each.unfused_attention),
        *(slow(GEMMA3, each) for each in OF_GEMMA),
        slow(GEMMA3, Layout(pp=2, tp=2, schedule="zb-v")),
        *(slow(SIGMOIDS, each) for each in EXPERT_LAYOUTS),
        (LATENT, LATENT_LAYOUTS[0]),
        *(slow(LATENT, each) for each in LATENT_LAYOUTS[1:]),
        *(slow(LATENT_KEYS, each) for each in LATENT_LAYOUTS[:4]),
        (LATENT, ABSORBED[0]),
        *(slow(LATENT, each) for each in ABSORBED[1:]),
        *(slow(LATENT_KEYS, each) for each in (*ABSORBED[:6], *ABSORBED[-3:])),
        slow(LATENT_KEYS, EXPERT_LAYOUTS[3]),
        *(slow(GPT_OSS, each) for each in OF_GPT_OSS),
        *(slow(MIXTRAL, each) for each in EXPERT_LAYOUTS[:2]),
        *(slow(GATED_SHARE, each) for each in EXPERT_LAYOUTS[1:3]),
    ],
    ids=str,
)
def test_layouts_step_as_the_reference(case: Case, layout: Layout) -> None:
    hold(case, layout)
