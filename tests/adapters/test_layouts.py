"""Low-rank adapters: every layout trains them as one device does, and sends what formulas say."""

import jax
import numpy as np
import pytest
import tiny
from one_device import case, hold, verified
from turns import slow

import jaxptd
from jaxptd import comms
from jaxptd.errors import UserError
from jaxptd.mesh import Layout, make_mesh
from jaxptd.models.families import work_of
from jaxptd.run.adapters import merged
from jaxptd.step import Program

LLAMA = {"family": "llama", "num_kv_heads": 2, "lora.rank": 3}
FASTER = {"ema_decay": 0.8, "rates": (("*.lora.b", 4.0),)}  # B learns faster: LoRA+
SOME = LLAMA | FASTER | {"num_layers": 3, "dropout": 0.1, "batch": 12}
GPT = {"lora.rank": 2, "lora.targets": ("attention.*",), "batch": 12}
EXPERTS = tiny.MOE | {"lora.rank": 2, "moe.shared_ffn_hidden_size": 8}
RING = {"tp": 4, "sequence_parallel": True, "collective_matmul": True}
OF_Q = {"lora.targets": ("*.q", "mlp.down"), "lora.rslora": True}


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        case(SOME, 2, dp=2, tp=2, sequence_parallel=True, zero=3),
        case(GPT, 2, pp=2, tp=2, schedule="zb-h1"),
        *(
            slow(*each.values)
            for each in (
                case(SOME, 2, dp=2, tp=2),
                case(LLAMA | {"batch": 8}, 2, **RING),
                case(GPT | {"remat": "dots"}, 1, dp=2, cp=2, zero=1),
                case(SOME | {"remat": "full"}, 2, cp=2, tp=2, ring="rsa"),
                case(EXPERTS, 2, dp=2, ep=2, zero=2),
                case(EXPERTS, 2, pp=2, ep=2, tp=2),
                case(tiny.LATENT | {"lora.rank": 2}, 2, tp=2, ulysses=2),
                case(tiny.T5 | {"lora.rank": 2}, 2, dp=2, tp=2, zero=2),
                case(tiny.T5 | {"lora.rank": 2} | {"lora.targets": ("cross.*",)}, 2, pp=2),
                case({"family": "bert", "lora.rank": 2}, 2, tp=4),
                case(LLAMA | OF_Q | {"optimizer": "muon"}, 2, dp=2, tp=2, zero=1),
                case(LLAMA | {"optimizer": "adafactor"}, 2, dp=2, tp=2, zero=1),
                case(LLAMA | {"mtp.layers": 1, "batch": 8}, 2, pp=2, tp=2),
                case(LLAMA | {"frozen": ("*.w",)}, 2, replicas=2, dp=2, zero=3),
                case(LLAMA | {"scan_layers": False}, 2, dp=2, zero=2),
            )
        ),
    ],
)
def test_a_step_equals_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_verified(dtype: str) -> None:
    layout = Layout(dp=2, tp=2, sequence_parallel=True, zero=3)
    assert verified(layout, dtype, **LLAMA).wrong == []


LAYOUTS = [
    (Layout(dp=2, tp=2, sequence_parallel=True, zero=3), SOME | {"remat": "full"}),
    (Layout(**RING), LLAMA),
    (Layout(dp=2, ep=2, zero=2), EXPERTS),
    (Layout(tp=4), LLAMA | OF_Q),
]
MORE = [
    (Layout(pp=2, dp=2, schedule="zb-h1", zero=2), LLAMA),
    (Layout(dp=2, tp=2), tiny.LATENT | {"lora.rank": 2}),
    (Layout(dp=2, tp=2, zero=1), tiny.T5 | {"lora.rank": 2}),
    (Layout(dp=2, tp=2, zero=1), LLAMA | {"optimizer": "muon"}),
    (Layout(cp=2, dp=2), GPT),
]


@pytest.mark.parametrize(("layout", "choice"), [*LAYOUTS, *(slow(*each) for each in MORE)])
def test_the_jaxpr_sends_what_the_formula_says(layout: Layout, choice: dict) -> None:
    program = tiny.program(layout, **choice)
    assert comms.subtract(comms.count(program), comms.formula(program)) == []


# ---- what adapters compute -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice",
    [
        LLAMA,
        {"lora.rank": 2, "lora.alpha": 3.0},
        *(slow(x) for x in (LLAMA | OF_Q, EXPERTS, tiny.LATENT | {"lora.rank": 2})),
    ],
)
def test_the_model_is_the_one_with_merged_weights(choice: dict) -> None:
    with jax.enable_x64(True):
        adapted = tiny.program(Layout(), dtype="float64", **choice)
        plain = {name: x for name, x in choice.items() if not name.startswith("lora.")}
        base = tiny.program(Layout(), dtype="float64", **plain)
        params, lora = tiny.random_params(adapted), adapted.config.model.lora
        assert lora is not None
        whole = {
            name: merged(
                x,
                params[f"{linear}.lora.a"],
                params[f"{linear}.lora.b"],
                matrix=adapted.infos[f"{linear}.lora.a"].matrix,
                scale=lora.scale,
            )
            if f"{(linear := name.removesuffix('.w'))}.lora.a" in params
            else x
            for name, x in params.items()
            if ".lora." not in name
        }
        found = [
            program.eval_step(program.states.new(values)["params"], tiny.batch())
            for program, values in ((adapted, params), (base, whole))
        ]
    first, second = (float(each["cross_entropy"]["sum"]) for each in found)
    assert first == pytest.approx(second, rel=1e-13)
    assert whole.keys() == base.infos.keys()


def test_a_new_adapter_changes_nothing_and_no_other_number() -> None:
    adapted, base = (
        Program(tiny.config(Layout(), **LLAMA | {"lora.rank": rank}), make_mesh(Layout()))
        for rank in (3, 0)
    )
    first, second = adapted.init_state()["params"], base.init_state()["params"]
    for name, x in second.items():
        np.testing.assert_array_equal(first[name], x)
    of_adapters = first.keys() - second.keys()
    assert all(np.any(first[name]) == name.endswith("lora.a") for name in of_adapters)
    assert len(of_adapters) == 2 * len(("q", "kv", "out", "up", "down"))


def test_compiled_steps_multiply_no_gradients_of_frozen_matrices() -> None:
    flops = {}
    for rank in (0, 2):
        program = tiny.program(Layout(), hidden_size=64, seq_length=32, **{"lora.rank": rank})
        arrays = program.abstract_state, program.abstract_batch
        flops[rank] = program.train_step.lower(*arrays).compile().cost_analysis()["flops"]
        flops["formula", rank] = work_of(program.config.model).flops
    assert 0.65 < flops["formula", 2] / flops["formula", 0] < 0.8
    assert 0.65 < flops[2] / flops[0] < 0.8


# ---- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "choice", "message"),
    [
        (Layout(row=2, col=2), LLAMA, r"model.lora with a grid.*use layout.tp"),
        (Layout(offload="optimizer"), LLAMA, r"model.lora with parameters or moments in host"),
        (Layout(), LLAMA | {"products": "fp8"}, r"model.lora with model.products=fp8"),
        (Layout(), {"lora.alpha": 3.0}, r"model.lora.alpha=3.0 has no effect without"),
        (Layout(), LLAMA | {"lora.targets": ()}, r"model.lora.targets is empty"),
        (Layout(), {"family": "swin", "lora.rank": 2}, r"model.lora.rank=2 has no effect with"),
        (Layout(), EXPERTS | {"moe.upcycle": True}, r"upcycle"),
    ],
)
def test_what_adapters_do_not_go_with_is_refused(layout, choice, message) -> None:
    with pytest.raises(UserError, match=message):
        tiny.config(layout, **choice)


def test_targets_that_name_no_matrix_are_refused() -> None:
    with pytest.raises(UserError, match=r"targets=attn.q names no matrix that can have"):
        tiny.program(Layout(), **LLAMA | {"lora.targets": ("attn.q", "mlp.up")}).init_state()


@pytest.mark.parametrize(
    ("choice", "name"), [(LLAMA, "model.lora"), ({"frozen": ("norm.*",)}, "optimizer.frozen")]
)
def test_a_plan_prices_no_step_in_which_some_parameters_stay(choice: dict, name: str) -> None:
    with pytest.raises(UserError, match=f"in which all parameters train, not those with {name}"):
        jaxptd.plan(tiny.config(Layout(), dtype="bfloat16", **choice), gpus=2, gpu="h200")
