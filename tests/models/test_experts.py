"""Mixtures of experts on every layout: equal steps, loads and choices; what is refused."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from one_device import hold
from turns import slow

from jaxptd.analysis.jaxprs import equations
from jaxptd.analysis.verification import verify
from jaxptd.config import Config, ModelConfig
from jaxptd.data import load_tokenizer
from jaxptd.errors import UserError
from jaxptd.mesh import Layout, make_mesh
from jaxptd.models.families import open_data_of
from jaxptd.step import Program
from jaxptd.step.expert_load import ENTROPY, LOAD

LOSSES = {"moe.balance_loss": 0.1, "moe.z_loss": 0.01}
# DeepSeek-V3's router, with a layer without experts before the others.
DEEPSEEK = {
    "family": "qwen3_moe",
    "moe.num_experts": 8,
    "moe.top_k": 3,
    "moe.score": "sigmoid",
    "moe.num_groups": 4,
    "moe.top_groups": 2,
    "moe.scale": 2.5,
    "moe.bias_rate": 0.01,
    "moe.router_bias": True,
    "moe.shared_ffn_hidden_size": 8,
    "moe.first_dense": 1,
}
QWEN = {
    "family": "qwen2_moe",
    "moe.num_experts": 4,
    "moe.top_k": 2,
    "moe.ffn_hidden_size": 6,
    "moe.shared_ffn_hidden_size": 8,
}
SP: Any = {"tp": 2, "sequence_parallel": True}
FOUR = {"num_layers": 4, "micro_batches": 4}
EVERYTHING = tiny.MOE | LOSSES | {"moe.bias_rate": 0.01, "dropout": 0.1}


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        slow(Layout(dp=2, ep=2, **SP), EVERYTHING | {"remat": "dots"}),
        (Layout(pp=2, ep=2, cp=2, zero=3), EVERYTHING | {"moe.chunk": 0.4}),
        (Layout(dp=2, ep=2, **SP, zero=2, experts="whole"), tiny.MOE | DEEPSEEK | LOSSES),
        slow(Layout(ep=2, zero=1), tiny.MOE | {"micro_batches": 3, "batch": 12, "remat": "dots"}),
        slow(Layout(dp=2, ep=2, zero=1), tiny.MOE | {"micro_batches": 3, "batch": 12}),
        slow(Layout(ep=2, cp=2, ring="rsa", zero=1), EVERYTHING | {"remat": "attention"}),
        slow(Layout(ep=4, tp=2), EVERYTHING | {"remat": "full"}),
        slow(Layout(ep=2, tp=2, experts="whole", zero=1), tiny.MOE | DEEPSEEK),
        slow(Layout(pp=2, ep=2, tp=2, experts="whole"), EVERYTHING),
        slow(Layout(ep=4, **SP, collective_matmul=True, zero=1), EVERYTHING),
        slow(
            Layout(pp=2, ep=2, sequence_parallel=True, collective_matmul=True, zero=3),
            EVERYTHING,
        ),
        slow(Layout(dp=2, ep=2, cp=2, zero=2), EVERYTHING | {"seq_length": 7}),
        slow(Layout(ep=2, cp=4, ring="blockwise"), tiny.MOE | DEEPSEEK | {"remat": "attention"}),
        slow(Layout(pp=2, cp=2, **SP, ring="rsa", zero=3), tiny.MOE | DEEPSEEK | {"remat": "full"}),
        slow(Layout(pp=2, ep=2, **SP, schedule="zb-h1"), EVERYTHING | {"remat": "dots"}),
        slow(Layout(pp=2, ep=2, tp=2, schedule="zb-v"), EVERYTHING | FOUR),
        slow(Layout(pp=2, ep=2, schedule="interleaved", zero=2), tiny.MOE | QWEN | FOUR),
        slow(Layout(pp=2, ep=2, tp=2, zero=1), tiny.MOE | DEEPSEEK | {"remat": "full"}),
        slow(Layout(pp=2, ep=2, schedule="zb-v", zero=1), tiny.MOE | DEEPSEEK | FOUR),
        slow(Layout(dp=2, ep=2, tp=2, zero=3), tiny.MOE | QWEN | {"scan_layers": False}),
        slow(Layout(dp=2, ep=4, zero=2), tiny.MOE | {"optimizer": "muon", "micro_batches": 1}),
        slow(Layout(dp=2, ep=2, tp=2, zero=3), tiny.MOE | {"optimizer": "adafactor"}),
        slow(Layout(ep=2, tp=2, offload="optimizer"), tiny.MOE | DEEPSEEK),
        slow(Layout(ep=2, tp=2, zero=3, offload="parameters"), EVERYTHING),
        slow(
            Layout(ep=8),
            tiny.MOE | DEEPSEEK | {"moe.every": 2, "num_layers": 3, "micro_batches": 1},
        ),
    ],
    ids=str,
)
def test_a_layout_takes_the_step_of_one_device(layout: Layout, choice: dict[str, Any]) -> None:
    hold(layout, **choice)


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16"), slow("float16"), slow("fp8")])
def test_below_float64_choices_of_one_device_are_replayed(dtype: Any) -> None:
    choice = {"num_layers": 1, "dropout": 0.3} if dtype == "float32" else {}
    report = verify(tiny.config(Layout(dp=2, ep=2, tp=2), **tiny.MOE, **choice), dtype=dtype)
    assert report.wrong == []
    assert report.margin is not None
    assert f"given its choices (smallest margin {report.margin:.1e})" in report.verdict
    assert [row.what for row in report.rows].count("choices") == (1 if choice else 2)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [2, 1])
def test_where_all_experts_are_chosen_no_margin_is_left(top_k: int) -> None:
    """Runs in float32 while JAX has float64 enabled."""
    choice = {"num_layers": 1, "moe.num_experts": top_k, "moe.top_k": top_k}
    layout = Layout(ep=top_k, dp=3 - top_k)
    report = verify(tiny.config(layout, **tiny.MOE | choice), dtype="float32")
    assert report.wrong == []
    assert report.margin == np.inf
    assert "given its choices (every token passes all experts): gradients" in report.verdict


# ---- choices are never made again ----------------------------------------------------------------


AGAIN = itertools.product(
    [Layout(ep=2), Layout(dp=2, ep=2, zero=3), Layout(pp=2, schedule="zb-h1")],
    ["none", "dots", "attention", "full"],
)


@pytest.mark.parametrize(
    ("layout", "remat"),
    [each if number % 3 == 2 else slow(*each) for number, each in enumerate(AGAIN)],
    ids=str,
)
def test_backward_never_chooses_again(layout: Layout, remat: str) -> None:
    program = tiny.program(layout, remat=remat, **tiny.MOE)
    params, batch = program.abstract_state["params"], program.abstract_batch
    step = program.train_step.trace(program.abstract_state, batch).jaxpr
    forward = program.eval_step.trace(params, batch).jaxpr
    assert choices_in(step) == choices_in(forward) >= 1


def choices_in(traced: Any) -> int:
    return sum(each.primitive.name == "top_k" for each in equations(traced.jaxpr))


# ---- loads ---------------------------------------------------------------------------------------


@functools.cache
def step_of(layout: Layout) -> tuple[dict, dict, dict]:
    """Parameters before and after a step, and its metrics; every layout starts the same.

    Of the seven tokens of a sequence, a zigzag of two devices makes eight.
    """
    choice = {"seq_length": 7, "moe.bias_rate": 0.125, "moe.balance_loss": 0.5}
    program = tiny.program(layout, **tiny.MOE | choice, **{"moe.dense_layers": (0,)})
    before = program.init_state()
    first = jax.tree.map(np.asarray, program.canonical(before["params"]))
    state, metrics = program.train_step(before, {n: x[:, :7] for n, x in tiny.batch().items()})
    after = jax.tree.map(np.asarray, program.canonical(state["params"]))
    return first, after, {name: np.asarray(x) for name, x in metrics.items()}


SPREAD = Layout(replicas=2, ep=2, cp=2, zero=2, replica_state="split")


def test_loads_and_their_biases_are_the_same_bits_on_every_layout() -> None:
    first, one, metrics = step_of(Layout())
    name = "blocks_1.mlp.router.load_bias"
    assert set(np.unique(one[name])) <= {-0.125, 0.0, 0.125}
    assert (one[name] != first[name]).any()
    assert np.isnan(metrics[LOAD]).tolist() == [True, False]
    assert metrics[LOAD][1] >= 1
    assert metrics[ENTROPY][1] <= 1
    _, spread, other = step_of(SPREAD)
    assert spread[name].tobytes() == one[name].tobytes()
    np.testing.assert_array_equal(other[LOAD], metrics[LOAD])


def test_padding_of_sequences_is_no_load() -> None:
    """Padding on a ring changes neither the share of an expert nor the loss that balances them."""
    (_, _, one), (_, _, padded) = step_of(Layout()), step_of(SPREAD)
    np.testing.assert_array_equal(padded[LOAD], one[LOAD])
    np.testing.assert_allclose(padded["balance_loss"], one["balance_loss"], rtol=1e-6)


def test_loads_are_no_part_of_the_gradient_norm_and_have_no_moments() -> None:
    _, _, metrics = step_of(Layout())
    assert metrics["grad_norm"] < 50  # the norm of the counts is above that
    program = tiny.program(Layout(), **tiny.MOE)
    names = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(program.abstract_state["optimizer"])
    ]
    assert any("router" in name for name in names)
    assert not any("load_bias" in name for name in names)


# ---- given and recorded choices ------------------------------------------------------------------


def test_the_choices_that_are_seen_can_be_given() -> None:
    program = tiny.program(Layout(dp=2, ep=2, **SP), **tiny.MOE, **{"moe.replay": True})
    params, none = program.init_state()["params"], np.full((8, 8, 2, 2), -1, np.int32)
    batch = tiny.batch() | {"choices": none}
    experts, margins = program.choices(params, batch)
    assert experts.shape == (8, 8, 2, 2)
    assert (margins > 0).all()
    assert (experts[..., 0] != experts[..., 1]).all()

    def loss(choices: np.ndarray) -> float:
        result = program.eval_step(params, batch | {"choices": choices})
        return float(result["cross_entropy"]["sum"])

    assert loss(experts) == loss(none)
    others = (experts + 1) % 4
    assert loss(others) != loss(none)
    again, _ = program.choices(params, batch | {"choices": others})
    np.testing.assert_array_equal(again, others)
    with pytest.raises(UserError, match=r"choices with 4; .* to 3, with model\.moe\.num_experts=4"):
        loss(np.full_like(experts, 4))


def test_stages_and_models_without_experts_show_no_choices() -> None:
    with pytest.raises(UserError, match=r"Program\.choices: the model has no experts"):
        tiny.program(Layout()).choices({}, {})
    with pytest.raises(UserError, match=r"layout\.pp=2: use layout\.pp=1"):
        tiny.program(Layout(pp=2), **tiny.MOE).choices({}, {})


@pytest.mark.parametrize(
    ("step", "words"),
    [(-1, "step is -1; use 0 or more, or None"), ("0", "step is '0'; expected a whole number")],
)
def test_a_step_of_choices_that_cannot_be_is_refused(step: Any, words: str) -> None:
    with pytest.raises(UserError, match=rf"Program\.choices: {words}"):
        tiny.program(Layout(), **tiny.MOE).choices({}, {}, step=step)


def test_data_names_no_experts() -> None:
    config = tiny.config(Layout(), **tiny.MOE, **{"moe.replay": True})
    with pytest.raises(UserError, match=r"^model\.moe\.replay=true: data does not name the exp"):
        open_data_of(config, load_tokenizer("bytes"))


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "choice", "words"),
    [
        (Layout(row=2, col=2), {}, r"model\.moe with a grid .* use layout\.tp instead"),
        (Layout(ep=3), {}, r"model\.moe\.num_experts=4 does not split over layout\.ep=3"),
        (Layout(), {"moe.top_k": 5}, r"a token can choose from 4 experts; use 4 or fewer"),
        (Layout(), {"moe.num_experts": 1}, r"a token can choose from 1 expert; use 1 or fewer"),
        (Layout(), {"moe.num_groups": 3}, r"num_experts=4 does not split over .*num_groups=3"),
        (Layout(), {"moe.top_groups": 2}, r"top_groups=2 is more than .*num_groups=1"),
        (Layout(), {"moe.shared_gate": True}, r"no effect with .*shared_ffn_hidden_size=0"),
        (Layout(), {"moe.dense_layers": (2,)}, r"there is no layer 2; .* use 0 to 1"),
        (Layout(), {"moe.first_dense": 2}, r"none of model\.num_layers=2 layers has experts"),
        (Layout(), {"moe.chunk": 0.0}, r"model\.moe\.chunk=0\.0 must be a number above 0"),
        (Layout(), {"family": "llama"}, r"model\.moe\S* has no effect with the family llama"),
    ],
)
def test_what_does_not_fit_is_one_line(layout: Layout, choice: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        tiny.config(layout, batch=24, **tiny.MOE | choice)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["expert", 4])
def test_an_unknown_field_in_python_is_one_line(name: Any) -> None:
    with pytest.raises(UserError, match=rf"^MoE has no field {name}; ") as error:
        ModelConfig(family="mixtral", moe={name: 4})
    assert "\n" not in str(error.value)


def test_a_model_with_experts_has_all_of_a_dense_models_fields() -> None:
    config: Config = tiny.config(Layout(), **tiny.MOE)
    assert config.model.moe is not None
    assert dataclasses.replace(config.model, remat="full").moe == config.model.moe
    assert make_mesh(Layout(ep=2)).shape["ep"] == 2
    assert Program(config, make_mesh(Layout())).infos["blocks.mlp.up.w"].shape == (2, 4, 16, 2, 8)
