"""Parts of the predicted peak, checked against small cases computed by hand."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from jaxptd.analysis import memory_model
from jaxptd.analysis.peak import OUTSIDE, Peak, outside, peak, working
from jaxptd.config import Config
from jaxptd.layers.attention import choose_kernel
from jaxptd.mesh import Layout
from jaxptd.models.families import architecture_of, family_of, sizes_of
from jaxptd.parts.attention import AttentionShape, HeadSizes
from jaxptd.step.resolved import resolve

GPU = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
FUSED = {"num_heads": 2, "dtype": "bfloat16"}  # head size 8
X = 4 * 8 * 16 * 2  # bytes of the residual stream: 4 sequences of 8 tokens, D = 16, 16 bits


def predicted(config: Config) -> Peak:
    devices = SimpleNamespace(flat=[GPU])
    resolved = resolve(config, SimpleNamespace(devices=devices))
    return peak(config, memory_model.state(config, resolved.zero), resolved.plan)


def working_set(remat: str, layout: Layout | None = None, **model: object) -> int:
    config = tiny.config(layout or Layout(), remat=remat, **FUSED | model)
    sizes = sizes_of(config)
    (stack,) = architecture_of(config.padded_model).stacks
    return working.layer([part.pair_bytes(sizes) for part in stack.parts], remat)


def test_a_layer_at_the_mlp() -> None:
    attention, mlp, weight = 1 + 1 + 3 + 1, 1 + 1 + 4 + 4, 64 * 16 * 2
    assert working_set("none") == (attention + mlp + (4 + 4) + 3) * X + weight


def test_a_layer_at_attention_where_the_mlp_is_computed_again() -> None:
    own, waiting, weight = 1 + 1 + 3 + 1 + (3 + 1), 3 + 1 + 4 + 4, 16 * 48 * 2
    assert working_set("full") == (own + waiting + 3) * X + weight


def test_tensor_parallelism_cuts_hidden_units_and_sequence_parallelism_x() -> None:
    halves, whole = 3 / 2 + 1 / 2 + (4 + 4) / 2 + (4 + 4) / 2, 2 + 2 + 3
    assert working_set("none", Layout(tp=2)) == (halves + whole) * X + 64 * 16
    # One gathered x per pair, and two while the gradient of x is gathered and transposed.
    shards, gathered = 1 / 2 + 1 / 2 + 3 / 2, 1 + 1 + 2
    sharded = working_set("none", Layout(tp=2, sequence_parallel=True))
    assert sharded == (halves + shards + gathered) * X + 64 * 16


def test_scores_are_whole_without_a_fused_kernel() -> None:
    scores = 2 * 4 * 2 * 8 * 8 * (4 + 2)  # in float32 and in 16 bits, for 4 sequences and 2 heads
    more = working_set("full", attention="xla") - working_set("full")
    assert more == scores - 3 * X  # the gradients of q, k and v come later


def test_one_pass_has_its_gradients_and_several_have_a_sum() -> None:
    one = predicted(tiny.config(Layout(), micro_batches=1, **FUSED))
    state = memory_model.state(tiny.config(Layout(), **FUSED), zero())
    assert one.state == state["parameters"] + state["optimizer"] + 2 * 4 * 8 * 8
    several = predicted(tiny.config(Layout(), remat="full", num_layers=40, **FUSED))
    layers = memory_model.state(tiny.config(Layout(), num_layers=40, **FUSED), zero(num_layers=40))
    assert several.moment == "layers"
    assert several.gradients == layers["gradients"]
    mixed = {"remat": "full", "remat_layers": 20, "num_layers": 40}  # two loops, with stacks
    stacked = predicted(tiny.config(Layout(), **mixed, **FUSED)).gradients
    table = (13 * 16 + 8 * 16) * 4
    assert stacked == layers["gradients"] + (layers["gradients"] - table) // 2


def zero(**model: object) -> object:
    config = tiny.config(Layout(), **FUSED | model)
    return resolve(config, SimpleNamespace(devices=SimpleNamespace(flat=[GPU]))).zero


def test_parts_add_up_with_a_margin() -> None:
    found = predicted(tiny.config(Layout(dp=2), **FUSED))
    assert found.total == sum(found.parts.values())
    rest = found.total - found.state - found.margin
    assert found.margin == round(0.01 * rest)


def test_layers_in_two_loops_have_copies_of_their_parameters() -> None:
    sizes = {"num_layers": 40, **FUSED}
    found = predicted(
        tiny.config(Layout(), micro_batches=1, remat="full", remat_layers=20, **sizes)
    )
    whole = predicted(tiny.config(Layout(), micro_batches=1, remat="full", **sizes))
    assert whole.copies == 0
    assert found.copies > 0.9 * 40 * (4 * 16 * 16 + 8 * 16 * 16) * 4


def test_a_split_backward_hands_gradients_on() -> None:
    layout = Layout(pp=2, schedule="zb-h1")
    config = tiny.config(layout, batch=16, micro_batches=4, **FUSED)
    split = predicted(config)
    joined = memory_model.activations(config, resolve(config, mesh()).plan)
    plan = resolve(config, mesh()).plan
    assert plan is not None
    # x of each pair and the gradients of q, k, v; the MLP's gradient reuses another's memory.
    assert split.kept - joined == plan.slots["between_blocks"] * (1 + 1 + 3) * X


def test_experts_save_nothing_in_8_bits() -> None:
    """Attention saves its input in 8 bits (half the bytes) and its output twice."""
    kept = [
        predicted(tiny.config(Layout(), **tiny.MOE, **FUSED, products=products)).kept
        for products in ("native", "fp8")
    ]
    assert kept[0] == kept[1]


def mesh() -> SimpleNamespace:
    return SimpleNamespace(devices=SimpleNamespace(flat=[GPU]))


def test_offloaded_state_is_not_on_the_device() -> None:
    here = predicted(tiny.config(Layout(tp=2), **FUSED))
    there = predicted(tiny.config(Layout(tp=2, offload="optimizer"), **FUSED))
    assert there.state < 0.1 * here.state
    kept = predicted(tiny.config(Layout(offload="activations"), remat="dots", **FUSED))
    assert kept.kept == 0


def test_stage_1_of_one_micro_batch_is_as_stage_2() -> None:
    """Cases in which the update needs the most memory."""
    sizes = {"hidden_size": 1600, "num_heads": 25, "vocab_size": 50304, "num_layers": 4}
    choice = FUSED | sizes | {"remat": "full", "micro_batches": 1}
    one, two = (
        predicted(
            tiny.config(Layout(dp=8, zero=zero, offload=("optimizer", "parameters")), **choice)
        )
        for zero in (1, 2)
    )
    assert one.moment == "update"
    assert one == two


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"dtype": "float32"},
        {"dropout": 0.1},
        {"num_heads": 4},
        {"attention": "xla"},
        {"family": "bert"},
        {"window": 4},
        tiny.T5,
    ],
    ids=lambda changed: ",".join(changed) or "bfloat16",
)
@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2), Layout(row=2, col=1)], ids=str)
def test_the_kernel_is_fused_where_the_step_chooses_it(layout: Layout, changed: dict) -> None:
    config = tiny.config(layout, **FUSED | changed)
    documents = family_of(config.model).has_documents(config)
    kernel, _ = choose_kernel(config, GPU, documents=documents)
    assert sizes_of(config).is_fused == (kernel == "cudnn")


@pytest.mark.parametrize(
    ("ring", "cp", "expected"),
    [
        ("zigzag", 2, 2 * (100 + 10) + 10),  # sums of q, and of k and v as they arrive; k and v
        ("zigzag", 4, 2 * (100 + 2 * 10) + 10),  # they arrive while others leave
        ("gather", 4, 2 * (100 + 4 * 10) + 4 * 10),  # all of them at once
        # As contiguous blocks, and scores of 2 heads in both precisions.
        ("rsa", 4, 2 * (100 + 2 * 10) + 10 + 4 * (8 // 4) * 2 * 8 * (2 + 4)),
    ],
)
def test_backward_of_a_ring_holds_float32_sums(ring: Any, cp: int, expected: int) -> None:
    """Of 100 bytes of queries and 10 of keys and values in bfloat16; 4 sequences of 8 tokens."""
    config = tiny.config(Layout(cp=cp, ring=ring), **FUSED)
    (stack,) = architecture_of(config.model).stacks
    attention = stack.parts[0]
    assert isinstance(attention, AttentionShape)
    assert HeadSizes(attention, sizes_of(config)).exchange.in_backward(100, 10) == expected


def test_nccl_is_for_several_devices() -> None:
    assert outside(Layout(dp=2)) == OUTSIDE
    assert [each.name for each in outside(Layout())] == [each.name for each in OUTSIDE[:2]]
    assert all(each.bytes > 0 and each.source for each in OUTSIDE)
    assert dataclasses.is_dataclass(Peak)
