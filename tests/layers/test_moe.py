"""Experts against plain loops over tokens and experts, with extremely uneven choices."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference.layers import MoE as Known
from reference.layers import Options, Part, mlp
from reference.moe import Routers, choice
from reference.tape import Value, constant, gradients, stacked
from turns import slow

from jaxptd.config import ModelConfig
from jaxptd.config.moe import MoE as MoEConfig
from jaxptd.kernels import grouped
from jaxptd.kernels.grouped import GroupTile, grouped_matmul
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.for_layout import make_tensor_parallel
from jaxptd.layers.mlp import hidden_units
from jaxptd.layers.moe import Experts, MoE, Pairs, Router, expert_sums
from jaxptd.mesh import SAMPLE_AXES, Layout, make_mesh
from jaxptd.params import Blueprint, normal, shardings
from jaxptd.parts.moe import MoEShape

TOLERANCE = 1e-12  # relative to the expected norm
Arrays = dict[str, np.ndarray]


def options(moe: Known | None = None) -> Options:
    """The reference's options for a gated layer."""
    return Options(1, 0, 2, "rmsnorm", 1e-5, "silu", gated=True, moe=moe)


def far(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference, divided by the expected norm where that is not zero."""
    return float(np.linalg.norm(found - expected) / (np.linalg.norm(expected) or 1))


def hold(found: Arrays, expected: Arrays) -> None:
    """Asserts that all are equal, and exactly zero where expected: no rounding happens there."""
    assert found.keys() == expected.keys()
    off = {name: far(found[name], want) for name, want in expected.items()}
    assert {name: error for name, error in off.items() if not error <= TOLERANCE} == {}
    for name, want in expected.items():
        if name.startswith("d_"):
            assert not found[name][want == 0].any(), name


# ---- rows of no group ----------------------------------------------------------------------------


def test_rows_after_the_last_group_reach_nothing() -> None:
    """Fills those rows with NaN, both in x and in the incoming gradient."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape) for shape in ((9, 4), (3, 4, 5), (9, 5)))
    x[6:] = dy[6:] = np.nan

    @jax.jit
    def both_ways(x: Any, w: Any, dy: Any) -> Any:
        y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.array([4, 0, 2], jnp.int32)), x, w)
        return y, *back(dy)

    with jax.enable_x64(True):
        y, dx, dw = map(np.asarray, both_ways(x, w, dy))
    of = np.array([0, 0, 0, 0, 2, 2])
    none, empty = np.zeros((3, 5)), np.zeros((4, 5))
    np.testing.assert_allclose(y, [*np.einsum("RD,RDF->RF", x[:6], w[of]), *none])
    np.testing.assert_allclose(dx, [*np.einsum("RF,RDF->RD", dy[:6], w[of]), *none[:, :4]])
    np.testing.assert_allclose(dw, [x[:4].T @ dy[:4], empty, x[4:6].T @ dy[4:6]])


# ---- a device's sums, with given choices ---------------------------------------------------------

E, D, F = 4, 6, 5  # E: experts on this device, only some of all


def sums_by_loops(given: Arrays, expert_nK: np.ndarray) -> Arrays:
    """Sums and gradients of tokens whose experts are the device's."""
    values = {name: Value(x) for name, x in given.items() if name != "dy"}
    layer = {name: values[name] for name in ("up.w", "down.w")}
    sums = []
    for token, experts in enumerate(expert_nK):
        y = constant(np.zeros(D))
        for k, e in enumerate(experts):
            if 0 <= e < E:
                x = values["x"][token][None, None]
                y = y + mlp(x, Part(layer, "", e), options())[0, 0] * values["weight"][token, k]
        sums.append(y)
    y = stacked(sums, (len(sums),))
    loss = (y * np.nan_to_num(given["dy"])).sum()  # tokens without an expert do not matter
    return {"y": y.x} | {f"d_{name}": g for name, g in gradients(loss, values).items()}


@functools.partial(jax.jit, static_argnums=0)
def device_sums(rows: int, given: Mapping[str, Any], expert_nK: Any) -> dict[str, Any]:
    """Computes the same with the layer. rows: rows of a chunk."""
    experts = Experts(hidden_units("silu", gated=True), rows, expert_nK.size)
    names = ("x", "weight", "up.w", "down.w")

    def run(*arguments: Any) -> Any:
        return expert_sums(experts, *arguments, Pairs.of(expert_nK, E, rows))

    y, back = jax.vjp(run, *(given[name] for name in names))
    found = zip(names, back(given["dy"]), strict=True)
    return {"y": y} | {f"d_{name}": g for name, g in found}


OTHERS = np.array([[-3, 7]])  # experts on other devices
CHOICES = {
    "of_all_devices": np.array([[0, 2], [5, 1], [3, -1], [-2, 4], [1, 0], [2, 6], [0, 3], [1, 2]]),
    "of_one_expert": np.array([[1, 6]] * 8),
    "without_an_expert": np.array([[0, 3], [3, 1]] * 4),
    "of_no_expert": np.repeat(OTHERS, 8, 0),
    "of_every_expert": np.array([[3, 1, 0, 2]] * 3),
    "of_one_token": np.array([[2, 0]]),
}


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("trips", ["one_chunk", "several_chunks"])
def test_sums_are_those_of_loops(choices: str, trips: str) -> None:
    expert_nK, rng = CHOICES[choices], np.random.default_rng(1)
    shapes = {"x": (len(expert_nK), D), "weight": expert_nK.shape, "dy": (len(expert_nK), D)}
    shapes |= {"up.w": (E, D, 2, F), "down.w": (E, F, D)}
    given = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    others = ((expert_nK < 0) | (expert_nK >= E)).all(1)
    given["x"][others] = given["dy"][others] = np.nan  # tokens of other devices
    rows = expert_nK.size if trips == "one_chunk" else min(3, expert_nK.size - 1)
    with jax.enable_x64(True):
        found = device_sums(rows, given, expert_nK)
    hold({name: np.asarray(x) for name, x in found.items()}, sums_by_loops(given, expert_nK))


@pytest.mark.parametrize("precision", ["native", slow("fp8")])
def test_our_kernels_make_the_same_sums(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses chunks, the last with rows of no expert, for which kernels write arbitrary values."""
    for name in ("TILE", "TILE_FP8"):
        monkeypatch.setattr(grouped, name, GroupTile(16, 16, 16, interpret=True))
    expert_nK, rng = CHOICES["of_all_devices"], np.random.default_rng(3)
    shapes = (8, D), (8, 2), (E, D, 2, F), (E, F, D)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]

    @functools.partial(jax.jit, static_argnums=0)
    def both_ways(kernel: Any, *arrays: Any) -> Any:
        experts = Experts(hidden_units("silu", gated=True), 5, expert_nK.size, kernel, precision)
        pairs = Pairs.of(jnp.asarray(expert_nK), E, 5)
        y, back = jax.vjp(lambda *given: expert_sums(experts, *given, pairs), *arrays)
        return y, *back(y)

    for ours, known in zip(both_ways("triton", *arrays), both_ways("xla", *arrays), strict=True):
        assert far(np.asarray(ours), np.asarray(known)) < 1e-6


# ---- a layer with its router, on one device and on eight -----------------------------------------

ONE, EIGHT = Layout(), Layout(ep=4, tp=2, sequence_parallel=True)
RING = Layout(ep=2, tp=2, sequence_parallel=True, collective_matmul=True)
SHAPE = (4, 2, D)  # of x: one token per device on eight
ROUTER, EXPERTS = MoEConfig(8, 2, 4, router_bias=True, balance_loss=1.0, z_loss=1.0), 8
PLAIN, CHUNKS = 4.0, 0.3  # `model.moe.chunk`: one chunk holds the worst case, or few rows


def layer_of(layout: Layout, chunk: float) -> Blueprint:
    """A layer of experts with biases."""
    moe = MoEConfig(**{**vars(ROUTER), "chunk": chunk})
    sizes: Any = {"num_layers": 1, "hidden_size": D, "num_heads": 1, "seq_length": SHAPE[1]}
    model = ModelConfig(family="mixtral", linear_bias="all", moe=moe, **sizes)

    def make(key: Any) -> MoE:
        return MoE(
            MoEShape.of(model),
            model,
            tensor_parallel=make_tensor_parallel(layout),
            rngs=nnx.Rngs(key),
            init_out=normal(0.02),
        )

    return Blueprint(make)


@functools.cache
def program(layout: Layout, chunk: float) -> Callable[[Arrays, Arrays], Arrays]:
    """(parameters, x and gradients of the results) -> results and gradients, from the layer."""
    blueprint, mesh = layer_of(layout, chunk), make_mesh(layout)
    tokens = P(SAMPLE_AXES, make_tensor_parallel(layout).axes.tokens or None)
    samples, positions = np.arange(SHAPE[0]), np.arange(SHAPE[1])

    def both_ways(params: Any, given: Any, sample_B: Any, position_T: Any) -> Any:
        info = TokenInfo(sample_B, position_T, None)

        def run(params: Any, x_BTD: Any) -> Any:
            y_BTD, said = blueprint.build(params)(x_BTD, info, 0)
            return y_BTD, said.terms_BTQ

        results, back = jax.vjp(run, params, given["x"])
        d_params, dx = back((given["dy"], given["dterms"]))
        return {"y": results[0], "terms": results[1]}, d_params, dx

    specs = blueprint.specs, tokens, P(SAMPLE_AXES), P()
    out = tokens, blueprint.specs, tokens
    run = jax.jit(jax.shard_map(both_ways, mesh=mesh, in_specs=specs, out_specs=out))

    def call(params: Arrays, given: Arrays) -> Arrays:
        infos = blueprint.infos
        stored = {name: np.asarray(infos[name].from_canonical(p)) for name, p in params.items()}
        placed = jax.device_put(stored, shardings(infos, mesh))
        given = jax.device_put(given, NamedSharding(mesh, tokens))
        results, d_params, dx = run(placed, given, samples, positions)
        moved = {f"d_{name}": infos[name].to_canonical(g) for name, g in d_params.items()}
        return {name: np.asarray(x) for name, x in (results | moved | {"d_x": dx}).items()}

    return call


def layer_by_loops(params: Arrays, given: Arrays) -> Arrays:
    """Computes the same with the reference; counts replace the choosing bias's gradient."""
    values = {name: Value(x) for name, x in params.items()} | {"x": Value(given["x"])}
    layer = {name: value[None] for name, value in values.items()}  # a stack of one
    routers = Routers(options(Known(balance_loss=1.0, z_loss=1.0)))
    y = routers(values["x"], Part(layer, "", 0))
    loss = (y * given["dy"]).sum()
    for number, term in enumerate(routers.terms):
        loss = loss + (term * given["dterms"][..., number]).sum()
    found = {f"d_{name}": g for name, g in gradients(loss, values).items()}
    found["d_router.load_bias"] = routers.counts["router.load_bias"][0]
    return {"y": y.x, "terms": np.stack([term.x for term in routers.terms], -1)} | found


BIASES = {  # biases of the router's logits and of its choices, and the resulting loads
    "any": ({}, {}, lambda loads: 1 < np.count_nonzero(loads) < EXPERTS and loads.max() < 8),
    "one_expert": ({}, {5: 9}, lambda loads: loads[5] == 8),
    "one_device": ({}, {0: 9, 1: 9}, lambda loads: (loads[:2] == 8).all()),  # device 0 of 4
    "without_an_expert": ({}, {3: -9, 4: 1}, lambda loads: loads[3] == 0),
    "ties": ({1: 1, 2: 1, 4: 1, 7: 1}, {}, lambda loads: (loads[1:3] == 8).all()),  # the first two
}


def steered(choices: str, params: Arrays) -> Arrays:
    """Parameters with which the router makes these choices."""
    of_logits, of_choices, _ = BIASES[choices]
    moved = {name: p.copy() for name, p in params.items()}
    if choices == "ties":  # no logit depends on x
        moved |= {name: 0 * p for name, p in params.items() if name.startswith("router.")}
    for name, biases in (("router.b", of_logits), ("router.load_bias", of_choices)):
        for expert, bias in biases.items():
            moved[name][expert] += bias
    return moved


@pytest.mark.parametrize(
    ("layout", "chunk"),
    [(ONE, PLAIN), (ONE, CHUNKS), (EIGHT, PLAIN), (EIGHT, CHUNKS), (RING, CHUNKS)],
    ids=str,
)
def test_layers_are_those_of_loops(layout: Layout, chunk: float) -> None:
    rng = np.random.default_rng(2)
    shapes = {name: info.shape for name, info in layer_of(ONE, chunk).infos.items()}
    scales = {"router.b": 0.1, "router.load_bias": 0.1}
    start = {
        name: scales.get(name, 0.5) * rng.standard_normal(shape)
        for name, shape in sorted(shapes.items())
    }
    given = {"x": SHAPE, "dy": SHAPE, "dterms": (*SHAPE[:2], 2)}
    given = {name: rng.standard_normal(shape) for name, shape in given.items()}
    for choices, (*_, are_so) in BIASES.items():
        params = steered(choices, start)
        with jax.enable_x64(True):
            found = program(layout, chunk)(params, given)
        expected = layer_by_loops(params, given)
        assert are_so(expected["d_router.load_bias"]), choices
        hold(found, expected)


# ---- choices -------------------------------------------------------------------------------------

GROUPS = {"num_groups": 4, "top_groups": 2}
ROUTERS = (
    {"score": "softmax", "router_bias": True},
    {"score": "sigmoid", **GROUPS},
    {"score": "softmax", **GROUPS, "group_score": "best"},
    {"score": "sigmoid", "num_groups": 8, "top_groups": 3, "top_k": 3},  # one expert
    {"score": "softmax", "num_groups": 2, "top_groups": 1, "top_k": 4},
    {"score": "sigmoid", "top_k": 8},
)


@pytest.mark.parametrize("fields", ROUTERS, ids=str)
def test_choices_and_margins_are_those_of_loops(fields: dict[str, Any]) -> None:
    """Includes ties: a third of the tokens are zero; experts and groups share biases."""
    moe, rng = MoEConfig(**{"num_experts": EXPERTS, "top_k": 2, **fields}), np.random.default_rng(4)
    model = ModelConfig(family="mixtral", hidden_size=D, num_heads=1, moe=moe)
    x_BTD = rng.standard_normal((3, 12, D))
    x_BTD[0] = 0
    one = make_tensor_parallel(ONE)
    made = Blueprint(
        lambda key: Router(MoEShape.of(model), model, tensor_parallel=one, rngs=nnx.Rngs(key))
    )
    params = {name: rng.standard_normal(info.shape) for name, info in made.infos.items()}
    params["load_bias"] = np.array([0.2, 0.1, 0.2, 0.1, 0.3, 0, 0, 0.3]) - 2  # all below zero
    if "b" in params:
        params["b"] = np.array([0, 0, 1.0, 1.0, 1.0, 0, 0, 1.0])
    info = TokenInfo(np.arange(3), np.arange(12), None)
    with jax.enable_x64(True):
        choose = jax.jit(lambda params, x_BTD: made.build(params).choose(x_BTD, info, 0))
        found = choose(params, x_BTD)
    logits_BTE = x_BTD @ params["w"] + params.get("b", 0)
    score_BTE = np.exp(logits_BTE) if moe.score == "softmax" else 1 / (1 + np.exp(-logits_BTE))
    if moe.score == "softmax":
        score_BTE /= score_BTE.sum(-1, keepdims=True)
    names = {"top_k": "chosen", "num_groups": "groups"}
    known = {names.get(n, n): value for n, value in fields.items() if n != "router_bias"}
    for b, t in np.ndindex(x_BTD.shape[:2]):
        rank_E = score_BTE[b, t] + params["load_bias"]
        chosen = choice(rank_E, Known(**known))
        assert chosen == list(found.expert_BTK[b, t])
        more = choice(rank_E, Known(**known | {"chosen": len(chosen) + 1}))
        margin = rank_E[more[-2]] - rank_E[more[-1]] if len(more) > len(chosen) else np.inf
        margin = min(margin, group_margin(moe, rank_E))
        np.testing.assert_allclose(found.margin_BT[b, t], margin, rtol=0, atol=1e-14)


def group_margin(moe: MoEConfig, rank_E: np.ndarray) -> float:
    """How much better the last chosen group is than the next; infinite if all are chosen."""
    if moe.top_groups == moe.num_groups:
        return np.inf
    best = 2 if moe.group_score == "best_two" else 1
    scores = np.sort(np.sort(rank_E.reshape(moe.num_groups, -1))[:, -best:].sum(1))[::-1]
    return float(scores[moe.top_groups - 1] - scores[moe.top_groups])
