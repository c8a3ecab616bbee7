"""Muon and Adafactor equal optax on one device, and one device on every layout."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import NamedSharding
from turns import by_turns, slow

from jaxptd.analysis.verification import verify
from jaxptd.mesh import Layout, make_mesh
from jaxptd.optimizers.adafactor import LARGEST_RMS
from jaxptd.optimizers.matrices import Sums
from jaxptd.optimizers.moments import is_orthogonalised
from jaxptd.optimizers.muon import RMS, newton_schulz
from jaxptd.step import Program

Tensors = dict[str, np.ndarray]

QWEN = {"family": "qwen3", "num_kv_heads": 2, "tie_embeddings": False}
ODD = {"num_heads": 3, "hidden_size": 15, "ffn_hidden_size": 23}
THREE = {"num_layers": 3, "tie_embeddings": False}


def program(layout: Layout, name: Any, **choice: Any) -> Program:
    """A program with this optimizer, its state zero and in float64."""
    config = tiny.config(layout, optimizer=name, dtype="float64", **choice)
    return tiny.FromZeros(config, make_mesh(layout))


def gradients(found: Program, number: int) -> Tensors:
    """Canonical gradients of one step, with different magnitudes in every matrix.

    For Adafactor they are tiny, so that the epsilon added to their squares matters.
    """
    rng = np.random.default_rng(number)
    size = 1e-12 if found.config.optimizer.name == "adafactor" else 1
    return {
        name: size
        * rng.normal(size=info.shape)
        * rng.lognormal(size=(info.shape[0],) + (1,) * (len(info.shape) - 1))
        for name, info in found.infos.items()
    }


def directions(found: Program, steps: int = 2) -> Tensors:
    """The optimizer's canonical update in the last of some steps, computed on its layout."""
    states, optimizer = found.states, found.resolved.optimizer
    specs = states.specs
    update = jax.jit(
        jax.shard_map(
            lambda g, s, p: optimizer.update(g, s, p),
            mesh=found.mesh,
            in_specs=(specs["params"], specs["optimizer"], specs["params"]),
            out_specs=(specs["params"], specs["optimizer"]),
            check_vma=True,
        )
    )
    state = found.init_state()
    step, kept = state["params"], state["optimizer"]
    for number in range(steps):
        stored = {
            name: jax.device_put(
                np.asarray(states.stored[name].from_canonical(jnp.asarray(g))),
                NamedSharding(found.mesh, specs["params"][name]),
            )
            for name, g in gradients(found, number).items()
        }
        step, kept = update(stored, kept, state["params"])
    return {name: np.asarray(x) for name, x in jax.jit(found.canonical)(step).items()}


@functools.cache
def one_device(name: str, choice: tuple) -> Tensors:
    return directions(program(Layout(), name, **dict(choice)))


# ---- on one device ---------------------------------------------------------------------------


def dimensions(kinds: str) -> Any:
    rows, columns = ([i for i, kind in enumerate(kinds) if kind == each] for each in "rc")
    return optax.contrib.MuonDimensionNumbers(rows, columns)


@pytest.mark.slow
def test_two_steps_of_muon_are_optax_s() -> None:
    with jax.enable_x64(True):
        one = program(Layout(), "muon", **QWEN)
        config = one.config.optimizer
        matrices = {n: dimensions(i.matrix) for n, i in one.infos.items() if is_orthogonalised(i)}
        theirs = optax.contrib.muon(
            1.0,
            beta=config.momentum,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            consistent_rms=RMS,
            muon_weight_dimension_numbers={n: matrices.get(n) for n in one.infos},
        )
        adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
        params = {n: np.zeros(i.shape) for n, i in one.infos.items()}
        state, others = theirs.init(params), adam.init(params)
        for number in range(2):
            grads = gradients(one, number)
            updates, state = jax.jit(theirs.update)(grads, state, params)
            plain, others = adam.update(grads, others)
        for name, found in one_device("muon", tuple(QWEN.items())).items():
            expected = -updates[name] if name in matrices else plain[name]
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12, err_msg=name)


def test_muon_takes_the_matrices_of_layers_and_adam_all_else() -> None:
    infos = tiny.program(Layout(), optimizer="muon", **QWEN).infos
    taken = {name for name, info in infos.items() if is_orthogonalised(info)}
    ends = ("attention.q.w", "attention.kv.w", "attention.out.w", "mlp.up.w", "mlp.down.w")
    assert taken == {f"blocks.{end}" for end in ends}
    assert {infos[name].matrix for name in taken} == {"srcc", "srscc", "srrc", "srsc", "src"}


def test_newton_schulz_makes_singular_values_about_one() -> None:
    x_RC = np.random.default_rng(0).normal(size=(24, 10)).astype(np.float32)
    found = jax.jit(newton_schulz)(x_RC)
    values = np.linalg.svd(np.asarray(found), compute_uv=False)
    assert 0.6 < values.min() <= values.max() < 1.3
    theirs = optax.contrib.scale_by_muon(
        beta=0, nesterov=False, weight_dimension_numbers=dimensions("rc")
    )
    expected, _ = jax.jit(lambda x: theirs.update(x, theirs.init(x)))(x_RC)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(jax.jit(newton_schulz)(np.zeros_like(x_RC)), 0.0)


@pytest.mark.slow
def test_two_steps_of_adafactor_are_optax_s_of_every_matrix() -> None:
    with jax.enable_x64(True):
        one = program(Layout(), "adafactor", **QWEN)
        theirs = optax.chain(
            optax.scale_by_factored_rms(min_dim_size_to_factor=1),
            optax.clip_by_block_rms(LARGEST_RMS),
        )
        first, second = (_apart(one, gradients(one, number)) for number in range(2))
        _, state = theirs.update(first, theirs.init(first), first)
        expected, _ = theirs.update(second, state, second)
        found = _apart(one, one_device("adafactor", tuple(QWEN.items())))
        assert found.keys() == expected.keys()
        for name, x in found.items():
            np.testing.assert_allclose(x, expected[name], rtol=1e-6, err_msg=str(name))


def _apart(one: Program, tensors: Tensors) -> Tensors:
    """Every matrix and every vector as a separate array."""
    found = {}
    for name, x in tensors.items():
        kinds = Sums(one.infos[name]).kinds
        order = [i for kind in "src" for i, each in enumerate(kinds) if each == kind]
        rows = np.prod([x.shape[i] for i, kind in enumerate(kinds) if kind == "r"], dtype=int)
        count = np.prod([x.shape[i] for i, kind in enumerate(kinds) if kind == "s"], dtype=int)
        shape = (rows, -1) if "r" in kinds else (-1,)
        stack = x.transpose(order).reshape(count, *shape)
        found |= {f"{name} {number}": each for number, each in enumerate(stack)}
    return found


# ---- on every layout -------------------------------------------------------------------------

PLACES = [
    (Layout(tp=4), QWEN),  # more devices than kv heads
    (Layout(row=2, col=2, attention2d="blocks"), ODD),
    (Layout(pp=2, dp=2, zero=1), THREE),
    (Layout(dp=2, row=2, col=2, zero=1), {}),
    (Layout(row=2, col=4), QWEN),
    (Layout(dp=2, ep=2), {}),
    (Layout(pp=2), {}),
    (Layout(ep=2, tp=4, zero=3, sequence_parallel=True), {}),
    (Layout(pp=2, ep=2, cp=2, zero=1), THREE),
    (Layout(dp=3, cp=2, zero=2), {"batch": 12}),
    (Layout(pp=2, dp=2, tp=2, zero=1, schedule="interleaved"), {"num_layers": 4}),
    (Layout(pp=2, row=2, col=2, attention2d="blocks"), ODD | THREE),
]
NAMES = ["muon", "adafactor"]
SPLIT = Layout(replicas=2, dp=2, tp=2, zero=2, replica_state="split"), {}


@pytest.mark.parametrize(
    ("place", "name"),
    [*by_turns(PLACES[:2], NAMES, first=1), *((SPLIT, name) for name in NAMES)],
    ids=str,
)
def test_layouts_go_where_one_device_goes(place, name) -> None:
    _holds(*place, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("layout", "choice"), PLACES[2:], ids=str)
def test_more_layouts_go_where_one_device_goes(layout, choice, name) -> None:
    _holds(layout, choice, name)


def _holds(layout: Layout, choice: dict, name: str) -> None:
    """Padding of vocabulary, heads and hidden units has no effect and stays zero."""
    with jax.enable_x64(True):
        spread = program(layout, name, **choice)
        found = directions(spread)
        sizes = {field: value for field, value in choice.items() if field != "batch"}
        for parameter, expected in one_device(name, tuple(sizes.items())).items():
            np.testing.assert_allclose(
                found[parameter], expected, rtol=1e-9, atol=1e-12, err_msg=parameter
            )


VERIFIED = [
    slow(Layout(ep=2, tp=2, zero=1), "muon", "float32"),
    slow(Layout(dp=2, row=2, col=2, zero=1, offload="optimizer"), "adafactor", "float64"),
    slow(Layout(dp=2, row=2, col=2, zero=2, offload="optimizer"), "muon", "float64"),
    slow(Layout(pp=2, dp=2, schedule="zb-h1", zero=2), "muon", "float64"),
    slow(Layout(cp=2, tp=2, sequence_parallel=True), "adafactor", "float32"),
    slow(Layout(dp=2, tp=4, zero=3), "muon", "bfloat16"),
]


@pytest.mark.parametrize(("layout", "name", "dtype"), VERIFIED, ids=str)
def test_a_whole_step_is_verified(layout, name, dtype) -> None:
    assert verify(tiny.config(layout, optimizer=name), dtype=dtype).wrong == []


@pytest.mark.slow
def test_verify_sees_a_matrix_that_is_not_whole(monkeypatch) -> None:
    monkeypatch.setattr("jaxptd.optimizers.muon.apply_to_whole", _each_block)
    found = verify(tiny.config(Layout(tp=2), optimizer="muon"), dtype="float32")
    wrong = {row.name for row in found.wrong}
    assert "blocks.0.mlp.up.w" in wrong
    assert not any(name.endswith(".b") for name in wrong)


def _each_block(fn: Any, x: Any, stored: Any) -> Any:
    """Treats each device's block as a whole matrix."""
    return fn(x.reshape(x.shape[0], x.shape[1], -1)).reshape(x.shape)
