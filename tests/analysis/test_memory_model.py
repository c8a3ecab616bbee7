"""Memory by formula equals what the step's program saves, to the byte, and published formulas."""

import dataclasses
import math
import re
from typing import Any

import jax
import pytest
import tiny
from turns import slow

from jaxptd.analysis import memory_model, memory_report
from jaxptd.analysis.memory_report import counted
from jaxptd.config import Config, ModelConfig, Remat
from jaxptd.mesh import Layout
from jaxptd.models.families import family_of
from jaxptd.step import Program

REMATS = ("none", "attention", "dots", "full")
UNEVEN = {"num_heads": 3, "hidden_size": 15, "ffn_hidden_size": 23}
KEEPING = dataclasses.replace(tiny.SEQUENCE_PARALLEL, keep_gathered=True)
RING_STEPS = dataclasses.replace(tiny.SEQUENCE_PARALLEL, collective_matmul=True)
BLOCKS = Layout(row=2, col=2, attention2d="blocks")
CP_BLOCKS = dataclasses.replace(BLOCKS, cp=2)
PATTERN = {
    "window": 3,
    "window_layers": (True, False),
    "positions": "rope",
    "rope.window_theta": 9.0,
}
# Heads of two widths, one of them in layers with a window.
WIDTHS = {"family": "llama", "num_kv_heads": 2, "num_layers": 4, "head_sizes": (2, 6), "window": 3}
WIDTHS |= {"window_layers": (True, False)}
ADAPTED = {"family": "llama", "num_kv_heads": 2, "lora.rank": 3}
SINKS = {"attention_sinks": True, "num_kv_heads": 2, "family": "llama"}
FIVE = {"num_layers": 5, "micro_batches": 4}
SCALES = {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_divisor": 2.0}
QWEN = {"family": "qwen3", "num_kv_heads": 2}
GPT_OSS = tiny.MOE | {"family": "gpt_oss", "window": 3, "window_layers": (True, False)}
GEMMA = {"family": "gemma3_text", "num_kv_heads": 2, "window": 3, "window_layers": (True, False)}
GEMMA |= {"rope.window_theta": 9.0, "logit_softcap": 2.0, "attention_softcap": 0.5}
GEMMA |= {"softcap_layers": (False, True)}


def every(layout: Layout, **choice: Any) -> list[Any]:
    return [(layout, choice | {"remat": remat}) for remat in REMATS]


def absorbed(layout: Layout, **choice: Any) -> list[Any]:
    return every(dataclasses.replace(layout, latent_products="absorbed"), **choice)


MOE = tiny.MOE | {"moe.balance_loss": 0.1, "moe.shared_ffn_hidden_size": 8}
SWIN = {"family": "swin-unet", "dropout": 0.1, "images.drop_path": 0.1}
LATENT = tiny.LATENT
WIDE_VALUES = LATENT | {"latent.value_size": 7}
PLAIN_QUERIES = LATENT | {"latent.q_rank": 0}
T5 = tiny.T5 | {"num_layers": 4, "micro_batches": 4}
QUICK = [
    (Layout(ep=2, zero=1), {"dropout": 0.1}),
    slow(Layout(dp=2, zero=1), T5 | {"dropout": 0.1}),
    *every(tiny.SEQUENCE_PARALLEL, dropout=0.1)[:1],
    *every(KEEPING, dropout=0.1)[:1],
    *every(BLOCKS, **UNEVEN)[:1],
    *every(Layout(cp=4, ring="rsa"), dropout=0.1)[1:2],
    *every(Layout(cp=4, ring="gather"), dropout=0.1)[2:3],
    (Layout(tp=4), {"num_layers": 5, "remat": "full", "remat_layers": 2}),
    (Layout(tp=4), QWEN | {"remat": "attention"}),  # more devices than kv heads
    (Layout(tp=4), QWEN | {"qk_norm": "whole", "remat": "dots"}),
    (Layout(cp=2), PATTERN),
    (tiny.SEQUENCE_PARALLEL, WIDTHS | {"remat": "full", "dropout": 0.1}),
    (Layout(pp=2, tp=2), WIDTHS | {"micro_batches": 4}),
    (tiny.SEQUENCE_PARALLEL, {"norm_order": "output", "remat": "dots"}),
    (tiny.SEQUENCE_PARALLEL, GEMMA | {"remat": "dots"}),
    (KEEPING, {"norm_order": "output"}),
    *every(Layout(cp=2, tp=2), **SINKS),
    (Layout(cp=2, ulysses=2), SINKS | {"remat": "none"}),
    (Layout(ulysses=4), QWEN | {"remat": "dots"}),  # more devices than kv heads
    (Layout(pp=2, tp=2), FIVE | {"z_loss": 0.1} | SCALES),
    (Layout(dp=2, tp=2, zero=3), {}),  # no full parameter is saved
    (Layout(tp=2, zero=2), {"dropout": 0.1, "micro_batches": 1}),
    (Layout(pp=2, row=2, col=2), FIVE | {"family": "bert"}),
    (Layout(tp=2), tiny.T5 | {"remat": "dots"}),
    (Layout(tp=2, sequence_parallel=True), {"family": "swin-unet", "remat": "full"}),
    (Layout(ep=2, tp=2, sequence_parallel=True), MOE | {"remat": "dots"}),
    (Layout(ep=2), tiny.MOE | {"remat": "dots", "products": "fp8"}),
    (Layout(ep=2, tp=2, sequence_parallel=True), LATENT | {"remat": "dots"}),
    (Layout(cp=2, tp=2, ring="rsa"), LATENT | {"dropout": 0.1}),
    (Layout(cp=2, tp=2), LATENT | {"remat": "dots"}),
    (Layout(ulysses=2), LATENT),
    (Layout(tp=2, latent_products="absorbed"), LATENT | {"remat": "dots"}),
    (Layout(ulysses=2, tp=2, latent_products="absorbed"), LATENT),
    (Layout(cp=2, tp=2, ring="rsa", latent_products="absorbed"), LATENT),
    (tiny.SEQUENCE_PARALLEL, PLAIN_QUERIES | {"remat": "attention"}),
    (Layout(tp=2, sequence_parallel=True, collective_matmul=True), ADAPTED | {"remat": "dots"}),
    (Layout(pp=2, tp=2), ADAPTED | FIVE | {"lora.targets": ("mlp.*",)}),
    (Layout(pp=2), FIVE | {"frozen": ("blocks.mlp.*",)}),
]
# One of the ways to recompute for each, in turn.
TURNS = [
    every(Layout(), **LATENT),
    every(tiny.SEQUENCE_PARALLEL, **LATENT, dropout=0.1),
    every(KEEPING, **LATENT),
    every(RING_STEPS, **LATENT),
    every(Layout(tp=4), **LATENT | {"num_heads": 6}),
    every(Layout(cp=2, tp=2), **LATENT, attention_sinks=True),
    every(Layout(cp=2, tp=2, latent_exchange="expanded"), **LATENT),
    every(Layout(cp=2, tp=2, sequence_parallel=True), **PLAIN_QUERIES),
    every(Layout(ulysses=2, tp=2, zero=1), **LATENT, dtype="bfloat16"),
    every(Layout(ulysses=2, latent_exchange="expanded"), **LATENT),
    absorbed(Layout(), **LATENT),
    absorbed(Layout(cp=2, tp=2), **LATENT),
    absorbed(Layout(ulysses=2, tp=2), **LATENT)[1:],
    absorbed(Layout(cp=2, ulysses=2), **WIDE_VALUES),
    absorbed(Layout(cp=2, tp=2, ring="rsa"), **LATENT)[1:],
    absorbed(Layout(cp=2, ring="gather"), **LATENT, attention_sinks=True),
    absorbed(tiny.SEQUENCE_PARALLEL, **LATENT, dropout=0.1),
    absorbed(RING_STEPS, **PLAIN_QUERIES),
    absorbed(Layout(pp=2, tp=2), **LATENT | FIVE | {"moe.first_dense": 1}),
    absorbed(Layout(dp=2, ep=2, tp=2, zero=3), **LATENT, dtype="bfloat16"),
    absorbed(Layout(tp=2), **LATENT, dtype="bfloat16"),
    absorbed(Layout(tp=4), **LATENT | {"num_heads": 6}),
    every(Layout(cp=2, tp=2, ring="rsa"), **LATENT)[1:],
    every(Layout(cp=2, tp=2, ring="gather"), **WIDE_VALUES),
    every(Layout(ulysses=2, tp=2), **LATENT),
    every(Layout(ulysses=2, cp=2), **WIDE_VALUES),
    every(Layout(pp=2, tp=2), **LATENT | FIVE | {"moe.first_dense": 1}),
    every(Layout(dp=2, ep=2, tp=2, zero=3), **LATENT, dtype="bfloat16"),
    every(Layout(), **PLAIN_QUERIES),
    every(Layout(tp=2), **PLAIN_QUERIES, norm_order="output"),
    every(KEEPING, **PLAIN_QUERIES, norm_order="post"),
    every(RING_STEPS, **PLAIN_QUERIES, norm_order="output"),
    every(tiny.SEQUENCE_PARALLEL, **PLAIN_QUERIES, norm_order="post"),
    every(tiny.SEQUENCE_PARALLEL, **PLAIN_QUERIES)[:2],
    every(Layout(ep=2, tp=2, sequence_parallel=True), **MOE)[:2],
    every(Layout(dp=2, ep=2, cp=2, zero=3), **MOE)[1:],
    every(Layout(ep=4, keep_gathered=True, tp=2, sequence_parallel=True), **tiny.MOE)[::3],
    every(Layout(pp=2, ep=2), **MOE | FIVE),
    every(Layout(ep=2, cp=2, ring="rsa"), **MOE)[1:3],
    every(tiny.SEQUENCE_PARALLEL, dropout=0.1)[1:],
    every(Layout(cp=4, ring="rsa"), dropout=0.1)[::2],
    every(Layout(cp=4, ring="gather"), dropout=0.1),
    every(Layout(cp=2, tp=2, ring="gather"), **QWEN),
    every(Layout(row=2, col=2, ring="gather"), window=3),
    every(Layout(cp=2, row=2, col=1, ring="gather"), **tiny.T5),
    every(Layout(pp=2, cp=2, ring="gather"), **FIVE)[2:],
    [(Layout(pp=2, cp=2), FIVE | {"remat": "dots", "remat_layers": 2, "dropout": 0.1})],
    [(Layout(pp=2), FIVE | {"remat": "full"})],
    [(Layout(pp=2, tp=2), FIVE | {"remat": "dots", "norm_order": "post"})],
    every(tiny.SEQUENCE_PARALLEL, norm_order="post")[1:3],
    every(Layout(cp=2, tp=2, ring="blockwise"), family="bert", dropout=0.1)[:1],
    [(Layout(ep=2, cp=2, tp=2, zero=3), tiny.T5 | {"dropout": 0.1})],
    every(Layout(tp=2, offload="parameters"), dropout=0.1),
    every(Layout(dp=2, row=2, col=2, zero=1, offload="parameters"), dropout=0.1),
    every(Layout(offload="parameters"), **tiny.T5, dropout=0.1),
    every(KEEPING, **tiny.T5, gated=True),
    every(KEEPING, norm_order="post"),
    every(KEEPING, **QWEN, remat_layers=1),
    every(tiny.SEQUENCE_PARALLEL, **QWEN, remat_layers=1),
    every(dataclasses.replace(KEEPING, dp=1, pp=2, tp=2), **T5),
    every(dataclasses.replace(KEEPING, dp=1, tp=2), family="bert", dtype="bfloat16"),
    every(Layout(cp=2, tp=2, sequence_parallel=True), **SWIN),
    every(Layout(tp=2, sequence_parallel=True), **SWIN),
    every(Layout(cp=2, row=2, col=2), **SWIN, **{"images.size": 32}),
    every(Layout(), family="swin", **{"images.drop_path": 0.1}),
    every(BLOCKS, **SWIN),
    every(Layout(row=2, col=2), **SWIN, dtype="bfloat16"),
    every(Layout(dp=2, tp=2, zero=3), **SWIN),
    every(RING_STEPS, **SWIN | {"micro_batches": 1}),
    every(Layout(row=2, col=2), **tiny.T5, dropout=0.1),
    every(tiny.SEQUENCE_PARALLEL, **tiny.T5, gated=True),
    every(RING_STEPS, **tiny.T5)[1:],
    every(BLOCKS, **tiny.T5),
    every(Layout(cp=4, ring="rsa"), **tiny.T5),
    every(Layout(pp=2, tp=2), **T5),
    [(Layout(pp=2, tp=2, schedule="interleaved"), T5)],
    every(Layout(pp=2, cp=2, schedule="interleaved"), **T5, dropout=0.1, remat_layers=1),
    every(Layout(), norm_order="post", **SCALES),
    every(tiny.SEQUENCE_PARALLEL, **SCALES),
    every(Layout(tp=4), **QWEN | {"qk_norm": "whole"}),
    every(Layout(cp=2, tp=2), **QWEN | {"qk_norm": "whole"}),
    every(Layout(row=2, col=2), **QWEN | {"qk_norm": "whole"}),
    every(BLOCKS, **QWEN | {"qk_norm": "whole"}),
    every(Layout(tp=4), **tiny.T5, qk_norm="whole", num_kv_heads=2),
    every(BLOCKS, norm_order="post"),
    every(RING_STEPS, norm_order="post"),
    every(Layout(row=2, col=2), dtype="bfloat16"),
    every(Layout(dp=2, zero=2)),
    every(Layout(), **QWEN, linear_bias="all"),
    every(Layout(tp=4, sequence_parallel=True), **QWEN),
    every(Layout(cp=2, tp=2), **QWEN),
    every(Layout(row=2, col=2), **QWEN),
    every(Layout(row=2, col=4), **QWEN, dtype="bfloat16"),
    every(BLOCKS, **QWEN),
    every(Layout(cp=4, ring="rsa"), **QWEN, dropout=0.1),
    every(Layout(pp=2, tp=4), **QWEN | FIVE),
    every(Layout(dp=2, pp=2, zero=3)),
    every(BLOCKS, **UNEVEN)[1:],
    every(CP_BLOCKS, **UNEVEN),
    every(CP_BLOCKS, **tiny.T5),
    [(dataclasses.replace(CP_BLOCKS, pp=2, row=1), FIVE | {"remat": "full"})],
    every(Layout(dp=2), dtype="bfloat16", dropout=0.1),
    every(Layout(cp=4, ring="rsa", zero=3), **tiny.T5)[:1],
    every(Layout(pp=2, row=2, col=2, attention2d="blocks"), **T5)[:1],
    every(Layout(tp=4)),
    every(tiny.CONTEXT_PARALLEL, dropout=0.1),
    every(RING_STEPS),
    every(Layout(cp=4)),
    every(Layout(cp=4, ring="blockwise"), window=4),
    every(Layout(cp=4), window=3),
    every(Layout(cp=4, ring="rsa"), window=4, dropout=0.1),
    every(Layout(cp=4, ring="blockwise"), window=4, window_layers=(True, False)),
    every(Layout(cp=2, tp=2), **PATTERN),
    every(Layout(tp=2), **PATTERN),
    every(Layout(), norm_order="output", **SCALES),
    every(tiny.SEQUENCE_PARALLEL, norm_order="output"),
    every(KEEPING, norm_order="output"),
    every(RING_STEPS, norm_order="output"),
    every(Layout(cp=2, tp=2), norm_order="output", dropout=0.1),
    every(Layout(row=2, col=2), norm_order="output"),
    every(BLOCKS, norm_order="output"),
    every(Layout(pp=2, tp=2), norm_order="output", **FIVE),
    every(Layout(dp=2, zero=3), norm_order="output"),
    every(Layout(ep=2, tp=2), norm_order="output", **MOE),
    every(Layout(ep=2, tp=2), **GPT_OSS),
    every(Layout(ep=2, tp=2, sequence_parallel=True), **GPT_OSS)[1:3],
    every(Layout(cp=2, tp=2, ring="gather"), **GPT_OSS)[:2],
    every(Layout(pp=2, ep=2, zero=2), **GPT_OSS | FIVE)[::2],
    every(Layout(), **ADAPTED),
    every(Layout(tp=4), **ADAPTED),
    every(KEEPING, **ADAPTED, dropout=0.1),
    every(RING_STEPS, **ADAPTED),
    every(Layout(cp=2, tp=2), **ADAPTED | {"lora.targets": ("*.q", "*.up")}),
    every(Layout(ep=2, tp=2), **MOE | {"lora.rank": 2}),
    every(tiny.SEQUENCE_PARALLEL, **LATENT | {"lora.rank": 2}),
    every(Layout(tp=2), **T5 | {"lora.rank": 2}),
    every(Layout(dp=2, zero=3), **ADAPTED, dtype="bfloat16"),
    every(Layout(), **WIDTHS),
    every(KEEPING, **WIDTHS),
    every(RING_STEPS, **WIDTHS),
    every(Layout(cp=4, ring="rsa"), **WIDTHS),
    every(Layout(cp=4, ring="gather"), **WIDTHS),
    every(BLOCKS, **WIDTHS),
    every(Layout(dp=2, tp=2, zero=3), **WIDTHS),
    every(Layout(pp=2, schedule="interleaved"), **WIDTHS | FIVE | {"num_layers": 8}),
    every(tiny.SEQUENCE_PARALLEL, **WIDTHS, norm_order="both"),
    every(tiny.SEQUENCE_PARALLEL, **WIDTHS, norm_order="post"),
    every(Layout(tp=2), **WIDTHS | {"num_layers": 6, "remat_layers": 2})[1:],
    every(Layout(), **GEMMA),
    every(Layout(tp=4), **GEMMA),
    every(tiny.SEQUENCE_PARALLEL, **GEMMA | {"dropout": 0.1}),
    every(KEEPING, **GEMMA),
    every(RING_STEPS, **GEMMA),
    every(Layout(cp=2, tp=2), **GEMMA),
    every(Layout(cp=4, ring="gather"), **GEMMA),
    every(Layout(row=2, col=2), **GEMMA),
    every(BLOCKS, norm_order="both"),
    every(Layout(pp=2, tp=2), **GEMMA | FIVE),
    every(Layout(dp=2, zero=3), **GEMMA),
    every(Layout(ep=2, tp=2), norm_order="both", **MOE),
    every(Layout(tp=4), **SINKS),
    every(Layout(cp=2, tp=2, ring="gather"), **PATTERN | SINKS),
    every(Layout(row=2, col=2), **SINKS),
    every(Layout(pp=2, tp=2), **SINKS | FIVE),
    every(Layout(cp=2, ulysses=2), dropout=0.1),
    every(Layout(ulysses=4), **QWEN),
    every(Layout(tp=4, ulysses=2), **QWEN | {"num_heads": 8}),
    every(Layout(ulysses=2, tp=2, sequence_parallel=True), **QWEN),
    every(Layout(ulysses=2, cp=2, tp=2, ring="rsa"), **QWEN),
    every(Layout(ulysses=2, cp=2, ring="gather"), **SINKS | PATTERN),
    every(Layout(cp=2, tp=2, ring="gather", balance="tokens"), **QWEN, documents="apart"),
    every(Layout(cp=2, ring="gather", balance="tokens"), documents="apart", dropout=0.1),
    every(Layout(pp=2, cp=2, ring="gather", balance="tokens"), **FIVE, documents="apart"),
    every(Layout(dp=2, balance="samples"), documents="apart", restart_positions=True),
    every(Layout(ulysses=2, tp=2), **tiny.T5),
    every(Layout(pp=2, ulysses=2), **T5),
    every(Layout(ulysses=2, ep=2, cp=2), **MOE),
    every(Layout(cp=2, row=2, col=2), dropout=0.1),
    every(BLOCKS, **UNEVEN, dtype="bfloat16", dropout=0.1),
    every(Layout(row=4, col=2, matmul2d="summa", attention2d="blocks"), **UNEVEN),
    every(Layout(pp=2, schedule="gpipe", cp=2, ring="rsa"), **FIVE, dropout=0.1),
    every(Layout(pp=2, schedule="interleaved", row=2, col=2), **FIVE, remat_layers=1),
]


@pytest.mark.parametrize(
    ("layout", "choice"),
    [*QUICK, *(slow(*each[i % len(each)]) for i, each in enumerate(TURNS))],
    ids=str,
)
def test_a_step_keeps_what_the_formula_says(layout: Layout, choice: dict[str, Any]) -> None:
    program = tiny.program(layout, **choice)
    assert counted(program) == memory_model.activations(program.config, program.resolved.plan)


@pytest.mark.parametrize("remat", ["none", "attention"])
def test_sequence_parallelism_keeps_its_share_of_what_one_device_keeps(remat: Remat) -> None:
    """All saved memory is sharded, except two matmul inputs per layer with `keep_gathered`."""
    keeping, sharded, one = (
        memory_model.activations(tiny.config(layout, remat=remat))
        for layout in (
            Layout(tp=4, sequence_parallel=True, keep_gathered=True),
            Layout(tp=4, sequence_parallel=True),
            Layout(),
        )
    )
    x = 4 * tiny.MODEL.seq_length * tiny.MODEL.hidden_size * 4  # for a micro-batch of 4 sequences
    assert sharded == one // 4
    assert keeping - sharded == tiny.MODEL.num_layers * 2 * (x - x // 4)


def test_backward_in_halves_keeps_something_between_them_too() -> None:
    program = tiny.program(Layout(pp=2, schedule="zb-h1"), **FIVE)
    found = counted(program)
    assert found is not None
    assert found > memory_model.activations(program.config, program.resolved.plan)


def test_unrolled_layers_are_not_counted() -> None:
    assert counted(tiny.program(Layout(), scan_layers=False)) is None


# ---- parameters, gradients and optimizer --------------------------------------------------------


def on_a_device(program: Program) -> dict[str, int]:
    """Bytes of the state on one device, from shapes and shardings; leaves out counters."""

    def block(x: Any) -> int:
        return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize if x.ndim else 0

    state = program.abstract_state
    return {n: sum(map(block, jax.tree.leaves(state[n]))) for n in ("params", "optimizer")}


@pytest.mark.parametrize(
    "layout",
    [
        *[Layout(dp=2, tp=4), Layout(row=2, col=2), Layout(pp=2, cp=2, tp=2), Layout(pp=3)],
        *[Layout(dp=2, ep=2, zero=1), Layout(pp=2, ep=2, cp=2, zero=2), Layout(dp=2, tp=4, zero=3)],
    ],
    ids=str,
)
def test_state_is_what_lies_on_a_device(layout: Layout) -> None:
    program = tiny.program(layout, num_layers=5)
    found, want = memory_model.state(program.config, program.resolved.zero), on_a_device(program)
    assert (found["parameters"], found["optimizer"]) == (want["params"], want["optimizer"])


def test_what_each_stage_of_zero_cuts_over_dp_and_cp() -> None:
    programs = [tiny.program(Layout(dp=2, cp=2, zero=z), dtype="bfloat16") for z in range(4)]
    found = [memory_model.state(p.config, p.resolved.zero) for p in programs]
    infos = programs[0].infos.values()
    whole = 4 * sum(math.prod(info.shape) for info in infos)
    ends = 4 * sum(math.prod(info.shape) for info in infos if not info.stack)
    matrices, tables = (
        2 * sum(math.prod(info.shape) for info in infos if info.cast and bool(info.stack) == inside)
        for inside in (True, False)
    )
    few = 4 * 4 * len(infos) * 2  # padding; at stages 2 and 3 each layer is padded separately
    for stage, each in enumerate(found):
        cut = 4 if stage else 1
        assert 0 <= each["parameters"] - whole / cut <= few
        assert each["optimizer"] == 2 * each["parameters"]
        assert 0 <= each["gradients"] - (whole if stage < 2 else ends + (whole - ends) / 4) <= few
    assert [s["gathered"] for s in found] == [0, *2 * [whole - matrices - tables], ends - tables]


@pytest.mark.parametrize("stage", range(4))
def test_layers_in_host_memory_are_not_gathered_for_the_step(stage: int) -> None:
    layout = Layout(dp=2, cp=2, zero=stage)
    programs = [
        tiny.program(dataclasses.replace(layout, offload=offload))
        for offload in ("none", "parameters", ("optimizer", "parameters"))
    ]
    plain, alone, both = (memory_model.state(p.config, p.resolved.zero) for p in programs)
    infos = programs[0].infos.values()
    assert alone["gathered"] == 4 * sum(math.prod(x.shape) for x in infos if not x.stack)
    assert {**alone, "parameters": 0, "gathered": 0} == {**plain, "parameters": 0, "gathered": 0}
    hosted = [memory_model.hosted(p.config.layout, alone) for p in programs]
    assert hosted == [0, alone["parameters"], alone["parameters"] + alone["optimizer"]]
    assert both == alone


def test_table_1_of_the_third_stage() -> None:
    program = tiny.program(Layout(dp=2, cp=2, zero=3))
    bytes_of_all = 4 * sum(math.prod(info.shape) for info in program.infos.values())
    assert memory_report.published_state(program.config, program.infos) == {
        "parameters": bytes_of_all // 2,  # 2P/N with N = 4
        "gradients": bytes_of_all // 4,
        "optimizer": bytes_of_all // 2,
    }


@pytest.mark.parametrize("zero", [0, 1])
def test_table_1_has_experts_split_over_ep(zero: Any) -> None:
    """ZeRO 1 splits all moments over dp, ep and cp, those of experts and of other parameters."""
    program = tiny.program(Layout(dp=2, ep=2, tp=2, zero=zero, experts="whole"), **tiny.MOE)
    sizes = {name: 4 * math.prod(info.shape) for name, info in program.infos.items()}
    experts = {name for name in sizes if re.search(r"\.(up|down)\.w$", name)}
    assert len(experts) == 2
    held = sum(size // (4 if name in experts else 2) for name, size in sizes.items())
    assert memory_report.published_state(program.config, program.infos) == {
        "parameters": held,
        "gradients": held,
        "optimizer": 2 * (sum(sizes.values()) // 8 if zero else held),
    }


# ---- as published -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "each"),
    [
        # 5 N T / D = 20; bytes / (b T D) with remat none, attention and full
        (Layout(), (54, 34, 2)),
        (Layout(tp=4), (10 + 24 / 4 + 20 / 4, 10 + 24 / 4, 2)),
        (Layout(tp=4, sequence_parallel=True), (54 / 4, 34 / 4, 2 / 4)),
        (Layout(row=2, col=2), (54 / 4, 34 / 4, 2 / 4)),
        (Layout(cp=4), (54 / 4, 34 / 4, 2 / 4)),
    ],
    ids=str,
)
def test_published_bytes_of_a_layer(layout: Layout, each: tuple[float, ...]) -> None:
    model = ModelConfig(hidden_size=64, num_heads=4, seq_length=64, vocab_size=13)
    config = Config(model=model, layout=layout)
    found = [memory_report.published_layer(config, r) for r in ("none", "attention", "full")]
    assert found == [8 * 64 * 64 * units for units in each]
    assert memory_report.published_layer(config, "dots") is None


def test_in_16_bits_this_library_keeps_32_where_34_and_scores_are_published() -> None:
    """A kernel saves no scores and no masks: only 32 b T D, statistics and a logsumexp."""
    model = dataclasses.replace(tiny.MODEL, dtype="bfloat16")
    config = Config(model=model, layout=Layout())
    tokens = 8 * model.seq_length
    beside = 4 * tokens * (4 + model.num_heads)
    (stack,) = family_of(model).architecture(model).stacks
    assert memory_model.layer(config, stack, "none") == 32 * tokens * model.hidden_size + beside
