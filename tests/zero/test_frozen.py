"""Frozen parameters: on every layout the others train as on one device, and nothing is kept or sent
for them besides their values.
"""

import jax
import numpy as np
import pytest
import tiny
from one_device import case, hold
from turns import slow

from jaxptd import comms
from jaxptd.analysis.memory_model import state
from jaxptd.errors import UserError
from jaxptd.mesh import Layout
from jaxptd.optimizers.moments import kept
from jaxptd.parts.sizes import elements_on_device

FROZEN = ("blocks.attention.*", "*.up.w", "tokens.*")
SOME = {"num_layers": 3, "dropout": 0.1, "batch": 12, "frozen": FROZEN}
UNROLLED = SOME | {"scan_layers": False}
EXPERTS = {"family": "mixtral", "frozen": ("blocks.attention.*", "blocks.mlp.*")}


# ---- one step -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        case(SOME, 2, dp=2, zero=1),
        case(SOME, 2, pp=2, dp=2, schedule="zb-h1", zero=3),
        *(
            slow(*each.values)
            for each in (
                case(SOME, 2, dp=2, tp=2),
                case(SOME, 1, dp=2, zero=1),
                case(SOME, 3, dp=2, zero=1),
                case(SOME | {"remat": "full"}, 2, dp=2, tp=2, sequence_parallel=True, zero=2),
                case(SOME | {"remat": "dots"}, 2, dp=2, cp=2, zero=3),
                case(UNROLLED, 1, dp=2, zero=2),
                case(UNROLLED | {"remat": "full"}, 2, dp=3, zero=3),
                case(SOME, 2, pp=2, tp=2),
                case(SOME, 2, pp=2, dp=2, zero=2),
                case(SOME | {"batch": 8}, 2, replicas=2, dp=2, zero=3, replica_state="split"),
                case(SOME | {"batch": 8}, 2, replicas=2, dp=2, zero=1),
                case(EXPERTS, 2, dp=2, ep=2, zero=1),
                case(EXPERTS, 2, pp=2, ep=2, zero=2),
                case(SOME | {"optimizer": "muon"}, 2, dp=2, tp=2, zero=2),
                case(SOME | {"optimizer": "adafactor"}, 2, dp=2, tp=2, zero=1),
                case({"family": "swin-unet", "frozen": ("*.up.w",)}, 1, dp=2, tp=2, zero=2),
            )
        ),
    ],
)
def test_a_step_equals_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


def test_the_others_have_their_gradients_and_frozen_ones_keep_every_bit() -> None:
    gradients = {}
    for frozen in ((), FROZEN):
        program = tiny.program(Layout(), frozen=frozen)
        gradients[frozen] = program.gradients(program.init_state(), tiny.batch())[2]
    trained, every = gradients[FROZEN], gradients[()]
    fixed = every.keys() - trained.keys()
    assert {"blocks.attention.out.w", "blocks.mlp.up.w", "tokens.table"} <= fixed
    assert {"blocks.mlp.down.w", "blocks.mlp_norm.w", "norm.w"} <= trained.keys()
    for name, gradient in trained.items():
        np.testing.assert_allclose(gradient, every[name], rtol=1e-5, atol=1e-7)
    assert all(np.any(every[name]) for name in fixed)

    start = jax.tree.map(np.asarray, program.init_state()["params"])
    after, metrics = program.train_step(program.init_state(), tiny.batch())
    for name, before in start.items():
        assert (name in fixed) == np.array_equal(before, after["params"][name]), name
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in trained.values()))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (("blocks.mpl.*",), "names no parameter"),
        (("*",), "names all parameters; leave some"),
    ],
)
def test_patterns_that_name_nothing_or_everything_are_refused(frozen: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny.program(Layout(), frozen=frozen).init_state()


def test_grids_are_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer.frozen with a grid.*use layout.tp"):
        tiny.config(Layout(row=2, col=2), frozen=FROZEN)


def test_a_state_in_host_memory_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer.frozen with parameters or moments in host"):
        tiny.config(Layout(offload="optimizer"), frozen=FROZEN)


# ---- costs --------------------------------------------------------------------------------------

LAYOUTS = [
    (Layout(dp=2, tp=2), {}),
    (Layout(dp=2, zero=1), {"micro_batches": 3, "batch": 12}),
    (Layout(dp=2, tp=2, sequence_parallel=True, zero=3), {"remat": "full"}),
    (Layout(pp=2, dp=2, schedule="zb-h1", zero=2), {}),
]
MORE = [
    (Layout(replicas=2, dp=2, zero=1, replica_state="split"), {}),
    (Layout(pp=2, dp=2), {}),
    (Layout(dp=2, zero=2), {"scan_layers": False}),
    (Layout(dp=2, tp=2, zero=1), {"optimizer": "muon"}),
    (Layout(dp=2, tp=2), {"optimizer": "adafactor"}),
]


@pytest.mark.parametrize(("layout", "choice"), [*LAYOUTS, *(slow(*each) for each in MORE)])
def test_the_jaxpr_sends_what_the_formula_says(layout: Layout, choice: dict) -> None:
    program = tiny.program(layout, frozen=FROZEN, **choice)
    assert comms.subtract(comms.count(program), comms.formula(program)) == []


@pytest.mark.parametrize(("layout", "choice"), LAYOUTS)
def test_the_state_keeps_no_moments_of_them(layout: Layout, choice: dict) -> None:
    program = tiny.program(layout, frozen=FROZEN, **choice)
    zero, config = program.resolved.zero, program.config
    moments = [x for x in jax.tree.leaves(program.abstract_state["optimizer"]) if x.shape]
    held = sum(map(_on_device, moments))
    assert state(config, zero)["optimizer"] == held
    frozen = [each for each in zero.stored.values() if each.info.frozen]
    assert frozen
    assert not any(kept(tiny.OPTIMIZER, each) for each in frozen)
    whole = state(tiny.config(layout, **choice), tiny.program(layout, **choice).resolved.zero)
    less = 2 * 4 * sum(elements_on_device(each, layout) for each in frozen)
    assert whole["optimizer"] - held == less


def _on_device(x: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
