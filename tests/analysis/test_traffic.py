"""Collectives agree between the jaxpr, the compiled program and the formula."""

import dataclasses
from collections.abc import Iterator

import jax
import pytest
import tiny
from turns import by_turns, latin, slow

from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.analysis.count import count, count_compiled, formula
from jaxptd.analysis.traffic import expected
from jaxptd.costs.collective import ALL_GATHER, BROADCAST, add_up, subtract
from jaxptd.mesh import SCHEDULES, Layout

REMATS = [{"remat": remat} for remat in ("none", "dots", "attention", "full")]
UNEVEN = {"num_heads": 3, "hidden_size": 15, "ffn_hidden_size": 23}
PLAIN = [Layout(dp=2, ep=2), Layout(tp=4), Layout(dp=2, tp=4), tiny.SEQUENCE_PARALLEL]
KEEPING = dataclasses.replace(tiny.SEQUENCE_PARALLEL, keep_gathered=True)
SHARDED = dataclasses.replace(tiny.SEQUENCE_PARALLEL, zero=1)
RING_STEPS = dataclasses.replace(tiny.SEQUENCE_PARALLEL, collective_matmul=True)
RINGS = [
    dataclasses.replace(layout, ring=ring)
    for layout in (Layout(cp=4), tiny.CONTEXT_PARALLEL)
    for ring in ("zigzag", "blockwise", "rsa")
]
GATHER = Layout(cp=4, ring="gather")
ULYSSES = Layout(cp=2, ulysses=2)
PLACED = [
    Layout(dp=2, cp=2, ring="gather", balance="tokens"),
    dataclasses.replace(ULYSSES, ring="gather", balance="tokens"),
]
PIPELINED = [
    Layout(pp=2, dp=2, tp=2),
    Layout(pp=2, cp=2, tp=2, sequence_parallel=True, ring="rsa"),
    *(Layout(pp=2, row=2, col=2, matmul2d=kind) for kind in ("gather", "summa", "fox", "cannon")),
]
GRIDS = [
    Layout(row=2, col=2),
    Layout(row=2, col=2, matmul2d="gather", matmul2d_slices=2),
    Layout(row=2, col=2, matmul2d="summa"),
    Layout(row=2, col=2, matmul2d="fox"),
    Layout(row=2, col=2, matmul2d="cannon"),
    Layout(row=2, col=4, ring="rsa"),
    Layout(row=4, col=2, matmul2d="summa", ring="blockwise"),
    Layout(dp=2, cp=2, row=2, col=1),
    Layout(dp=2, cp=2, row=1, col=2),
]
BLOCKS = [
    Layout(row=2, col=2, matmul2d=kind, attention2d="blocks")
    for kind in ("gather", "summa", "fox", "cannon")
]
MATRIX = [
    (Layout(), {}),
    *by_turns(PLAIN, [*REMATS[:2], REMATS[3], {"micro_batches": 1}]),
    slow(tiny.SEQUENCE_PARALLEL, {}),
    *by_turns([KEEPING], REMATS),
    *by_turns([RING_STEPS], REMATS, first=3),
    *by_turns([RINGS[0], *RINGS[2:4]], [*REMATS[1:3], {"documents": "apart"}, REMATS[3]]),
    *(
        slow(ring, choice)
        for ring, choice in zip(
            [RINGS[1], *RINGS[4:]], [REMATS[1], REMATS[3], {"documents": "apart"}], strict=True
        )
    ),
    *by_turns([GATHER], [REMATS[3] | {"dtype": "bfloat16"}, *REMATS[:3]]),
    *by_turns([ULYSSES], [REMATS[1], REMATS[0], *REMATS[2:], {"documents": "apart"}]),
    slow(Layout(dp=2, ulysses=4, zero=3), REMATS[3]),
    *(slow(dataclasses.replace(ULYSSES, ring=ring), REMATS[1]) for ring in ("rsa", "gather")),
    slow(dataclasses.replace(tiny.CONTEXT_PARALLEL, ring="gather"), {"documents": "apart"}),
    *by_turns(PLACED, [{"documents": "apart"}, REMATS[3] | {"documents": "apart"}]),
    *by_turns([Layout(row=2, col=2, ring="gather")], [REMATS[1], REMATS[3]]),
    slow(Layout(cp=2, row=2, col=2, ring="gather"), REMATS[2] | {"dtype": "bfloat16"}),
    slow(Layout(cp=2, row=2, col=2, attention2d="blocks", ring="gather"), UNEVEN),
    *by_turns(GRIDS[:6], [REMATS[0], REMATS[1], REMATS[3]]),
    *(slow(grid, REMATS[i]) for i, grid in enumerate(GRIDS[6:])),
    *(slow(layout, UNEVEN | REMATS[i]) for i, layout in enumerate(BLOCKS)),
    *(slow(Layout(row=2, col=2, ring=ring), REMATS[2]) for ring in ("zigzag", "rsa")),
    *(slow(layout, {"dtype": "bfloat16"}) for layout in GRIDS[2:5]),
    slow(Layout(row=2, col=2, attention2d="blocks"), UNEVEN | {"dtype": "bfloat16"}),
    slow(Layout(dp=2, row=2, col=2), {"ffn_hidden_size": 27, "documents": "apart"}),
    *by_turns([dataclasses.replace(BLOCKS[0], cp=2)], [UNEVEN | remat for remat in REMATS]),
    *(slow(dataclasses.replace(layout, cp=2), UNEVEN) for layout in BLOCKS[1:]),
]
FOUR = {"num_layers": 4, "micro_batches": 4}
# With a single layer per part, XLA would drop the end of its second run.
EIGHT = FOUR | {"num_layers": 8, "remat": "full"}
PIPELINES = [
    slow(Layout(pp=4), FOUR | {"micro_batches": 1}),
    (Layout(pp=2, ep=2, tp=2), FOUR | {"num_layers": 5, "tie_embeddings": False}),
    (Layout(pp=2, schedule="interleaved", tp=4, sequence_parallel=True), EIGHT),
    slow(Layout(pp=2, tp=4, sequence_parallel=True, collective_matmul=True), EIGHT),
    slow(Layout(pp=3, schedule="gpipe", dp=2, stage_layers=(0, 3, 1)), FOUR | {"remat": "dots"}),
    slow(Layout(pp=2, schedule="zb-v", cp=2, tp=2), FOUR | {"documents": "apart"}),
    (dataclasses.replace(RING_STEPS, dp=1, pp=2, schedule="zb-v"), FOUR),  # W sends blocks again
    *(
        slow(dataclasses.replace(RING_STEPS, dp=1, pp=2, schedule="zb-h1"), FOUR | {"remat": remat})
        for remat in ("dots", "full")
    ),
    slow(Layout(pp=4, schedule="zb-h2", cp=2, ring="rsa"), FOUR | {"remat": "full"}),
    slow(Layout(pp=2, cp=2, tp=2, schedule="zb-v", ring="gather"), FOUR | {"remat": "dots"}),
    slow(Layout(pp=2, cp=4, schedule="interleaved", ring="gather"), FOUR | {"remat": "full"}),
    slow(Layout(pp=2, cp=2, ulysses=2, schedule="zb-v"), FOUR | {"remat": "dots"}),
    slow(Layout(pp=4, schedule="zb-h1", tp=2), FOUR | {"dtype": "bfloat16", "remat": "attention"}),
    slow(Layout(pp=2, row=2, col=2), FOUR | {"remat": "full"}),
    slow(Layout(pp=2, row=2, col=2, matmul2d="cannon", schedule="zb-h1"), FOUR),
    slow(Layout(pp=2, row=2, col=2, matmul2d="summa", attention2d="blocks"), FOUR | UNEVEN),
    slow(Layout(pp=2, row=2, col=2, matmul2d="fox"), FOUR | {"dtype": "bfloat16"}),
]
QWEN = {"family": "qwen3", "num_kv_heads": 2}
OLMO = QWEN | {"qk_norm": "whole"}
ODD_HEADS = QWEN | {"head_size": 6, "tie_embeddings": False}
OPTIONS = [
    (Layout(tp=4), QWEN | {"remat": "dots"}),  # more devices than kv heads
    slow(RING_STEPS, QWEN | {"remat": "full"}),
    slow(Layout(tp=2), QWEN | {"remat": "attention"}),
    slow(Layout(cp=4), QWEN),
    slow(Layout(cp=2, tp=2, ring="rsa"), QWEN | {"remat": "full"}),
    slow(Layout(cp=2, tp=4, ring="gather"), QWEN | {"remat": "attention"}),
    (Layout(ulysses=4, tp=2, zero=2), QWEN | {"remat": "attention", "num_heads": 8}),
    *(slow(Layout(cp=2, ulysses=2, tp=2), QWEN | each) for each in REMATS[:2]),
    slow(Layout(row=2, col=4), QWEN | {"remat": "dots"}),
    slow(Layout(row=4, col=2, matmul2d="summa"), QWEN | {"remat": "full"}),
    (Layout(row=2, col=2, attention2d="blocks"), ODD_HEADS | {"remat": "dots"}),
    slow(Layout(row=2, col=2, attention2d="blocks", matmul2d="summa"), QWEN | {"remat": "full"}),
    slow(Layout(row=2, col=2, attention2d="blocks", matmul2d="cannon"), QWEN),
    slow(Layout(pp=2, tp=2, schedule="zb-v"), FOUR | QWEN),
    slow(Layout(pp=2, row=2, col=2, schedule="zb-h1"), FOUR | QWEN | {"remat": "full"}),
    slow(Layout(dp=2, tp=4, zero=3, sequence_parallel=True), QWEN),
    (Layout(tp=4), OLMO),  # sums the norm's statistics over slices of keys
    slow(Layout(tp=4, sequence_parallel=True), OLMO | {"remat": "full"}),
    slow(Layout(dp=2, tp=2), OLMO | {"remat": "dots", "dtype": "bfloat16"}),
    slow(Layout(row=2, col=2), OLMO | {"remat": "attention"}),
    slow(Layout(row=2, col=2, attention2d="blocks"), OLMO | {"head_size": 6, "remat": "full"}),
    slow(Layout(pp=2, tp=2, schedule="zb-h1"), FOUR | OLMO),
    slow(RING_STEPS, OLMO | {"remat": "dots"}),
    slow(Layout(tp=2, cp=2), tiny.T5 | {"qk_norm": "whole", "num_kv_heads": 2}),
]
LOSSES = {"moe.balance_loss": 0.1, "moe.z_loss": 0.1}
SHARED = {"moe.shared_ffn_hidden_size": 8, "moe.first_dense": 1}
EP_SP = Layout(ep=2, tp=4, sequence_parallel=True)
BIASES = {"family": "gpt_oss", "linear_bias": "all"}
EXPERTS = [
    (EP_SP, tiny.MOE | LOSSES | {"remat": "dots"}),
    (Layout(dp=2, ep=2, cp=2, zero=3), tiny.MOE | SHARED),
    (Layout(pp=2, ep=2, tp=2, zero=2), tiny.MOE | LOSSES | {"remat": "full"}),
    # Each replica has every expert once: their gradients wait for the end of the step.
    (Layout(replicas=2, ep=2, tp=2, zero=1), tiny.MOE | {"micro_batches": 4, "batch": 16}),
    slow(Layout(ep=2, ulysses=2), tiny.MOE | LOSSES),
    slow(Layout(dp=2, ep=2, tp=2), tiny.MOE | {"remat": "full"}),
    slow(Layout(dp=2, ep=2, tp=2, zero=1), tiny.MOE | {"optimizer": "adafactor"}),
    slow(Layout(dp=2, ep=2, tp=2, zero=2), tiny.MOE | {"optimizer": "muon"}),
    slow(Layout(dp=2, ep=2, tp=2, zero=3), tiny.MOE | {"scan_layers": False}),
    slow(dataclasses.replace(EP_SP, keep_gathered=True), tiny.MOE | SHARED),
    slow(dataclasses.replace(EP_SP, collective_matmul=True), tiny.MOE | {"remat": "attention"}),
    slow(dataclasses.replace(EP_SP, tp=1, collective_matmul=True), tiny.MOE | LOSSES),
    slow(dataclasses.replace(EP_SP, zero=3), tiny.MOE | {"dtype": "bfloat16"}),
    slow(Layout(ep=2, cp=2, tp=2, ring="rsa"), tiny.MOE | LOSSES | {"remat": "attention"}),
    slow(Layout(pp=2, ep=2, cp=2, schedule="zb-h1"), FOUR | tiny.MOE | {"remat": "dots"}),
    slow(Layout(pp=2, ep=2, tp=2, schedule="zb-v"), FOUR | tiny.MOE | LOSSES),
    slow(Layout(pp=2, ep=2, schedule="interleaved"), FOUR | tiny.MOE | SHARED),
    (Layout(ep=2, tp=2), tiny.MOE | BIASES),
    slow(EP_SP, tiny.MOE | BIASES | SHARED | {"remat": "full"}),
    slow(Layout(ep=2, tp=2, experts="whole"), tiny.MOE | BIASES),
    slow(dataclasses.replace(EP_SP, collective_matmul=True), tiny.MOE | BIASES),
    slow(Layout(dp=2, ep=2, tp=2, zero=3), tiny.MOE | BIASES),
    slow(Layout(pp=2, cp=2, tp=2, schedule="zb-v"), FOUR | tiny.MOE | BIASES),
]


def absorbed(layout: Layout) -> Layout:
    return dataclasses.replace(layout, latent_products="absorbed")


LATENT, PLAIN_QUERIES = tiny.LATENT, tiny.LATENT | {"latent.q_rank": 0}
LATENTS = [
    (EP_SP, LATENT | {"remat": "dots"}),
    (Layout(dp=2, ep=2, tp=2), LATENT | {"remat": "full"}),
    (Layout(pp=2, cp=2, tp=2, schedule="zb-v"), FOUR | LATENT),
    slow(Layout(cp=2, tp=2, sequence_parallel=True), LATENT | {"remat": "attention"}),
    slow(Layout(tp=4), LATENT | {"num_heads": 6}),
    slow(dataclasses.replace(EP_SP, keep_gathered=True), LATENT),
    slow(RING_STEPS, LATENT | REMATS[1]),
    slow(RING_STEPS, PLAIN_QUERIES | {"remat": "full"}),
    slow(tiny.SEQUENCE_PARALLEL, PLAIN_QUERIES | REMATS[2]),
    slow(dataclasses.replace(RING_STEPS, dp=1, pp=2, schedule="zb-v"), FOUR | LATENT),
    slow(dataclasses.replace(RING_STEPS, dp=1, pp=2, schedule="zb-h1"), FOUR | LATENT | REMATS[3]),
    slow(Layout(pp=2, tp=4, sequence_parallel=True, schedule="zb-h1"), FOUR | LATENT | REMATS[1]),
    slow(Layout(pp=2, cp=2, tp=2, ring="rsa"), FOUR | LATENT | {"remat": "dots"}),
    slow(Layout(dp=2, ulysses=2, tp=2, zero=2), LATENT | {"moe.first_dense": 1}),
    slow(Layout(cp=4, ring="gather", zero=3), LATENT | {"dtype": "bfloat16"}),
    slow(Layout(cp=4, ring="blockwise"), LATENT | {"window": 4}),
    (Layout(cp=2, ulysses=2, tp=2), LATENT | {"remat": "dots"}),
    slow(Layout(cp=2, tp=2, latent_exchange="expanded"), LATENT),
    slow(Layout(ulysses=2, tp=2, latent_exchange="expanded"), LATENT | {"remat": "full"}),
    *(
        slow(Layout(cp=2, tp=2, sequence_parallel=True, collective_matmul=True), each)
        for each in (LATENT, PLAIN_QUERIES | {"remat": "full"})
    ),
    slow(Layout(dp=2, tp=2, sequence_parallel=True, zero=2), LATENT | {"optimizer": "muon"}),
    slow(Layout(dp=2, tp=2, sequence_parallel=True, zero=1), LATENT | {"optimizer": "adafactor"}),
]
ABSORBED = [
    (absorbed(EP_SP), LATENT | {"remat": "dots"}),
    (absorbed(Layout(cp=2, ulysses=2, tp=2)), LATENT | {"remat": "attention"}),
    (absorbed(Layout(cp=2, ulysses=2, ring="rsa")), LATENT | {"remat": "full"}),
    slow(absorbed(RING_STEPS), LATENT | {"remat": "full"}),
    slow(absorbed(RING_STEPS), PLAIN_QUERIES),
    slow(absorbed(Layout(cp=2, tp=2, sequence_parallel=True)), LATENT | REMATS[3]),
    slow(absorbed(Layout(cp=4, ring="gather", zero=3)), LATENT | REMATS[0]),
    slow(absorbed(Layout(cp=2, ulysses=2, tp=2)), LATENT | REMATS[1]),
    slow(absorbed(Layout(cp=2, ulysses=2, ring="rsa")), LATENT | REMATS[2]),
    slow(absorbed(Layout(cp=4, ring="blockwise")), LATENT | {"window": 4}),
    slow(absorbed(Layout(pp=2, cp=2, tp=2, schedule="zb-v")), FOUR | LATENT),
    slow(absorbed(dataclasses.replace(RING_STEPS, dp=1, pp=2, schedule="zb-v")), FOUR | LATENT),
    slow(
        absorbed(Layout(pp=2, tp=4, sequence_parallel=True, schedule="zb-h1")),
        FOUR | LATENT | REMATS[1],
    ),
]
AHEAD = {"mtp.layers": 2}
MODULES = [  # which run with the head
    (Layout(pp=2, cp=2, tp=2, schedule="zb-h1"), FOUR | AHEAD | {"remat": "dots"}),
    slow(Layout(dp=2, ep=2, tp=2, zero=3), LATENT | AHEAD | {"moe.balance_loss": 0.1}),
    (Layout(row=2, col=2, matmul2d="summa"), AHEAD | {"remat": "full"}),
    slow(RING_STEPS, AHEAD | {"remat": "full"}),
    slow(Layout(cp=2, ulysses=2), AHEAD | {"remat": "attention", "norm_order": "output"}),
    slow(Layout(pp=2, ep=2, zero=1), FOUR | LATENT | AHEAD | {"moe.bias_rate": 0.1}),
    slow(Layout(pp=2, row=2, col=2, attention2d="blocks"), AHEAD | {"tie_embeddings": False}),
]
# One layer without a window makes blocks travel to all devices in every layer.
PATTERN = {"window": 3, "window_layers": (True, False)}
SINKS = {"attention_sinks": True, "num_kv_heads": 2, "family": "llama"}
# All layers with narrow heads have the window, and only in them blocks travel less far.
WIDTHS = PATTERN | {"num_kv_heads": 2, "family": "llama", "num_layers": 4, "head_sizes": (2, 6)}
BLOCKWISE = Layout(cp=4, ring="blockwise")  # blocks of two tokens
WINDOWS = [
    (BLOCKWISE, {"window": 4, "remat": "full"}),
    slow(BLOCKWISE, {"window": 1}),  # no hops
    slow(Layout(cp=4, ring="rsa"), {"window": 3, "remat": "dots"}),
    (BLOCKWISE, PATTERN),
    slow(Layout(cp=4, ring="rsa"), PATTERN | {"remat": "dots"}),
    (BLOCKWISE, WIDTHS | {"remat": "full"}),
    slow(Layout(cp=4, ring="rsa"), WIDTHS | REMATS[3]),
    slow(tiny.SEQUENCE_PARALLEL, WIDTHS | REMATS[0]),
    slow(RING_STEPS, WIDTHS | {"remat": "full"}),
    slow(Layout(row=2, col=2), WIDTHS | {"remat": "full"}),
    slow(Layout(dp=2, tp=2, zero=3), WIDTHS | {"optimizer": "muon"}),
    slow(Layout(pp=2, tp=2), WIDTHS | FOUR | {"remat": "full"}),
    slow(Layout(pp=2, cp=2, schedule="zb-h1"), WIDTHS | FOUR | {"remat": "dots"}),
    # One period of two on each stage recomputes, and gathers its matrices once more.
    slow(
        Layout(pp=2, dp=2, schedule="zb-h1", zero=3),
        WIDTHS | FOUR | {"num_layers": 8, "remat": "dots", "remat_layers": 2},
    ),
    slow(Layout(pp=2, cp=2, tp=2, ring="zigzag"), FOUR | PATTERN),
    (Layout(cp=2, tp=2, sequence_parallel=True), SINKS),
    slow(Layout(row=2, col=2), SINKS),
    (Layout(cp=4, ring="gather"), PATTERN | SINKS),
    slow(Layout(cp=4), {"window": 3}),
    slow(GATHER, {"window": 3}),
    slow(Layout(row=4, col=2, ring="blockwise"), {"window": 3, "remat": "attention"}),
    slow(Layout(cp=2, row=2, col=2, ring="blockwise"), {"window": 4}),  # gradients return over cp
    slow(Layout(cp=2, row=2, col=2, ring="rsa"), {"window": 5, "remat": "full"}),
    slow(Layout(row=2, col=2, attention2d="blocks"), {"window": 3}),
    slow(Layout(cp=2, row=2, col=2, attention2d="blocks", ring="rsa"), QWEN | {"window": 3}),
    slow(Layout(pp=2, cp=4, ring="blockwise", schedule="zb-v"), FOUR | {"window": 5}),
]
FIVE = {"num_layers": 5, "remat_layers": 2}
POST = {"norm_order": "post"}
OUTPUT = {"norm_order": "output"}
SPLIT = Layout(pp=2, tp=2, sequence_parallel=True, schedule="zb-h1")
BOTH = {"norm_order": "both"}
SCALES = {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_divisor": 2.0}
HEAD = {"z_loss": 0.1, "logit_softcap": 2.0, "max_positions": 12} | SCALES
HEADS = [
    (Layout(ep=2, tp=2, zero=2), HEAD),
    slow(Layout(row=2, col=2), HEAD),
    slow(Layout(pp=2, tp=2), FOUR | HEAD),
    slow(tiny.SEQUENCE_PARALLEL, POST | {"remat": "full"}),
    slow(RING_STEPS, POST | {"remat": "full"}),
    slow(Layout(tp=4), POST | {"remat": "dots"}),
    slow(Layout(row=2, col=2), POST | {"remat": "full"}),
    slow(Layout(pp=2, tp=2, sequence_parallel=True), FOUR | POST | {"remat": "dots"}),
    slow(Layout(pp=2, row=2, col=2, matmul2d="summa"), FOUR | POST),
    (tiny.SEQUENCE_PARALLEL, OUTPUT | {"remat": "full"}),
    slow(tiny.SEQUENCE_PARALLEL, OUTPUT | {"remat": "dots"}),
    slow(RING_STEPS, OUTPUT | {"remat": "full"}),
    slow(Layout(tp=4), OUTPUT | {"remat": "full"}),
    slow(Layout(row=2, col=2), OUTPUT | {"remat": "full"}),
    slow(Layout(pp=2, tp=2, sequence_parallel=True), FOUR | OUTPUT | {"remat": "dots"}),
    slow(Layout(pp=2, row=2, col=2, matmul2d="summa"), FOUR | OUTPUT | {"remat": "full"}),
    # W reads masks that B passes on.
    (SPLIT, FOUR | OUTPUT | {"remat": "dots", "dropout": 0.1, "family": "llama"}),
    (Layout(row=2, col=2), BOTH | {"remat": "full"}),
    slow(tiny.SEQUENCE_PARALLEL, BOTH | REMATS[1]),
    slow(RING_STEPS, BOTH | {"remat": "full"}),
    slow(Layout(tp=4), BOTH | REMATS[2]),
    slow(Layout(row=2, col=2), BOTH | {"remat": "dots"}),
    slow(Layout(row=2, col=2, attention2d="blocks"), BOTH | {"remat": "full"}),
    slow(Layout(pp=2, tp=2, sequence_parallel=True), FOUR | BOTH | {"remat": "dots"}),
    slow(Layout(pp=2, row=2, col=2, matmul2d="summa"), FOUR | BOTH | {"remat": "full"}),
]
BERT = {"family": "bert"}
ENCODERS = [
    slow(Layout(cp=2, tp=2, ring="blockwise"), BERT | {"remat": "dots"}),
    (tiny.SEQUENCE_PARALLEL, BERT | {"remat": "full"}),
    slow(tiny.SEQUENCE_PARALLEL, BERT | {"num_layers": 4, "head_sizes": (2, 6)}),
    slow(Layout(row=2, col=2, attention2d="blocks"), BERT),
    slow(Layout(pp=2, dp=2, tp=2, zero=2), BERT | FOUR),
    slow(Layout(pp=2, row=2, col=2, schedule="zb-h1"), BERT | FOUR | {"remat": "full"}),
    slow(RING_STEPS, BERT),
    slow(Layout(cp=4, ring="rsa"), BERT),
    slow(GATHER, BERT),
    slow(Layout(row=2, col=4, matmul2d="summa"), BERT | {"remat": "dots"}),
]
ENCODER_DECODERS = [
    slow(Layout(dp=2, cp=2, tp=2, sequence_parallel=True, zero=3), tiny.T5 | {"remat": "full"}),
    (Layout(row=2, col=2, attention2d="blocks"), tiny.T5),
    slow(Layout(cp=2, row=2, col=2, attention2d="blocks"), tiny.T5 | {"remat": "dots"}),
    slow(Layout(pp=2, cp=2, col=2, attention2d="blocks", schedule="zb-v"), tiny.T5 | FOUR),
    slow(Layout(pp=2, tp=2, schedule="zb-v"), tiny.T5 | FOUR),
    (Layout(tp=2), tiny.T5),
    *(slow(layout, tiny.T5) for layout in (tiny.SEQUENCE_PARALLEL, KEEPING, SHARDED)),
    slow(tiny.SEQUENCE_PARALLEL, tiny.T5 | FIVE | {"remat": "attention"}),
    slow(RING_STEPS, tiny.T5 | {"remat": "dots"}),
    slow(Layout(row=2, col=2), tiny.T5),
    slow(Layout(row=2, col=2), tiny.T5 | {"remat": "attention"}),
    slow(Layout(row=2, col=2), tiny.T5 | {"scan_layers": False}),
    slow(Layout(dp=2, row=2, col=2, zero=2), tiny.T5),
    slow(Layout(cp=4, ring="rsa"), tiny.T5 | {"remat": "attention"}),
    slow(Layout(cp=2, row=2, col=2, ring="gather"), tiny.T5 | {"remat": "full"}),
    slow(Layout(pp=2, row=2, col=2), tiny.T5 | FOUR),
    slow(Layout(pp=2, cp=2, tp=2, schedule="interleaved"), tiny.T5 | FOUR | {"remat": "full"}),
    slow(Layout(pp=2, dp=2, tp=2, zero=2), tiny.T5 | FOUR | {"remat": "full", "remat_layers": 1}),
]
SWIN = {"family": "swin-unet"}
DROPS = SWIN | {"dropout": 0.1, "images.drop_path": 0.1}
TOGETHER = SWIN | {"images.dice": "batch", "micro_batches": 1}
GATHERED = Layout(row=2, col=2)
IMAGES = [
    slow(Layout(cp=2, tp=2, sequence_parallel=True), DROPS | {"remat": "dots"}),
    slow(GATHERED, SWIN | {"remat": "full"}),
    (Layout(ep=2, tp=2, sequence_parallel=True), TOGETHER),
    slow(Layout(ep=2, cp=2, row=2, zero=3), TOGETHER),
    slow(Layout(tp=2, sequence_parallel=True), DROPS | {"remat": "dots"}),
    slow(Layout(dp=2, cp=2, zero=3), SWIN | {"remat": "full", "images.size": 32}),
    slow(Layout(cp=2, row=2, col=2), SWIN | {"remat": "attention", "dtype": "bfloat16"}),
    slow(Layout(cp=2, row=2, col=2, attention2d="blocks"), DROPS | {"dtype": "bfloat16"}),
    slow(Layout(cp=2, row=2, col=2, attention2d="blocks"), {"family": "swin"}),
    slow(Layout(cp=2), {"family": "swin", "images.size": 32, "remat": "full"}),
    slow(Layout(dp=2, tp=4, zero=3), SWIN | {"remat": "full", "micro_batches": 1}),
    slow(Layout(dp=4, zero=1), DROPS),
    slow(Layout(dp=2, tp=2, sequence_parallel=True, collective_matmul=True, zero=2), SWIN),
    slow(Layout(tp=2, offload="optimizer"), SWIN | {"scan_layers": False}),
    slow(Layout(tp=2, offload="activations"), SWIN | {"remat": "dots"}),
    *(
        slow(dataclasses.replace(GATHERED, matmul2d=kind, dp=2), SWIN | remat)
        for kind, remat in zip(("summa", "fox", "cannon"), REMATS[1:], strict=True)
    ),
    slow(dataclasses.replace(GATHERED, matmul2d_slices=3, zero=2, dp=2), DROPS),
    slow(BLOCKS[0], DROPS | REMATS[3]),
    slow(Layout(row=2, col=4, matmul2d="summa"), {"family": "swin"}),
    slow(Layout(dp=2, tp=2, sequence_parallel=True), {"family": "swin"}),
]
MIXED = [
    slow(tiny.SEQUENCE_PARALLEL, FIVE | {"remat": "full"}),
    slow(Layout(tp=4), FIVE | {"remat": "full", "scan_layers": False}),
    slow(Layout(cp=4), FIVE | {"remat": "attention"}),
    slow(Layout(cp=2, ring="rsa"), FIVE | {"remat": "dots"}),
    slow(Layout(row=2, col=2), FIVE | {"remat": "full"}),
    slow(Layout(row=2, col=2), {"vocab_multiple": 32}),
    (Layout(tp=4), {"vocab_multiple": 32}),
    slow(Layout(row=2, col=2, attention2d="blocks"), FIVE | {"remat": "dots"}),
    # The parts have 3 and 2 layers; each recomputes two.
    slow(Layout(pp=2, tp=2, sequence_parallel=True), FIVE | {"remat": "full", "micro_batches": 4}),
    slow(Layout(pp=2, cp=2, stage_layers=(1, 4)), FIVE | {"remat": "attention"}),
    slow(Layout(pp=2, row=2, col=2, schedule="zb-h1"), FOUR | {"remat": "full", "remat_layers": 1}),
    slow(KEEPING, FIVE | {"remat": "attention"}),
    slow(tiny.SEQUENCE_PARALLEL, FIVE | {"remat": "full", "scan_layers": False}),
]


ALL = (
    MATRIX
    + PIPELINES
    + OPTIONS
    + EXPERTS
    + LATENTS
    + ABSORBED
    + MODULES
    + WINDOWS
    + HEADS
    + ENCODERS
    + ENCODER_DECODERS
    + IMAGES
    + MIXED
)


@pytest.mark.parametrize(("layout", "choice"), ALL, ids=str)
def test_the_jaxpr_moves_what_the_formula_says(layout: Layout, choice: dict) -> None:
    program = tiny.program(layout, **choice)
    assert subtract(count(program), formula(program)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "schedule", "remat"),
    latin(PIPELINED, SCHEDULES, ["none", "dots", "attention", "full"]),
    ids=str,
)
def test_every_pipeline_moves_what_the_formula_says(layout, schedule, remat) -> None:
    program = tiny.program(dataclasses.replace(layout, schedule=schedule), remat=remat, **FOUR)
    assert subtract(count(program), formula(program)) == []


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traces programs as on GPUs, and clears JAX's caches so that no CPU test shares a trace."""
    monkeypatch.setattr("jaxptd.collectives.traced_for_gpus", lambda: True)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("as_on_gpus")
def test_a_grid_of_gpus_moves_what_the_formula_says() -> None:
    """SUMMA uses XLA's broadcast; Fox cannot."""
    for kind, some in (("summa", True), ("fox", False)):
        program = tiny.program(Layout(row=2, col=2, matmul2d=kind))
        wanted = add_up(expected(program.config, program.infos, on_gpus=True))
        assert subtract(count(program), wanted) == []
        assert any(each.kind == BROADCAST for each in wanted) == some


UNROLLED = {"scan_layers": False, "remat": "dots"}
COMPILED = [
    # XLA on CPU inlines a loop of a single iteration, and then never gathers twice.
    slow(Layout(dp=2, tp=2, sequence_parallel=True, keep_gathered=True), DROPS),
    slow(Layout(cp=2), DROPS),
    slow(Layout(dp=2, tp=4), UNROLLED),
    slow(tiny.SEQUENCE_PARALLEL, {"scan_layers": False}),
    # If unrolled, XLA on CPU drops the barrier before the backward ring, and the first hop.
    slow(tiny.CONTEXT_PARALLEL, {}),
    # Positions are looked up once for all micro-batches.
    slow(GRIDS[3], {"micro_batches": 1}),
    slow(*PIPELINES[2]),
    slow(BLOCKWISE, {"window": 4}),
]
MORE_COMPILED = [
    (Layout(dp=2, tp=4), {}),
    *((tiny.SEQUENCE_PARALLEL, choice) for choice in (UNROLLED, {})),
    *((layout, {"micro_batches": 1}) for layout in (*GRIDS[:3], *GRIDS[4:6])),
    *((Layout(cp=4, ring="rsa"), choice) for choice in ({}, {"window": 4})),
    (tiny.SEQUENCE_PARALLEL, FIVE | {"remat": "dots"}),
    PIPELINES[1],
    *((dataclasses.replace(PIPELINED[0], schedule=kind), EIGHT) for kind in SCHEDULES),
    (dataclasses.replace(PIPELINED[1], schedule="zb-h1"), FOUR),
    *((layout, FOUR) for layout in (Layout(pp=4, schedule="zb-h1", tp=2), Layout(pp=4, dp=2))),
    (Layout(cp=4), FIVE | {"remat": "attention"}),
    (Layout(cp=2, ring="rsa"), FIVE | {"remat": "dots"}),
    *((GATHER, {"remat": remat}) for remat in ("none", "full")),
    (Layout(row=2, col=2), FIVE | {"remat": "full", "micro_batches": 1}),
    (Layout(tp=4), {"vocab_multiple": 32}),
]
COMPILED += [slow(*each) for each in MORE_COMPILED]


@pytest.mark.parametrize(("layout", "choice"), COMPILED, ids=str)
def test_the_compiled_program_moves_the_same_bytes(layout: Layout, choice: dict) -> None:
    """XLA may merge reductions, which changes the counts but not the bytes."""
    program = tiny.program(layout, **choice)
    found = {(c.kind, c.axes): c.bytes for c in count_compiled(program, CPU_OPTIONS)}
    assert found == {(c.kind, c.axes): c.bytes for c in count(program)}


@pytest.mark.slow
def test_xla_gathers_the_gradient_of_scores_once_for_two_products() -> None:
    """Backward multiplies it by keys and by queries; the jaxpr gathers it for each matmul."""
    choice = FIVE | {"remat": "dots", "micro_batches": 1}
    program = tiny.program(Layout(row=2, col=2, attention2d="blocks"), **choice)
    more = add_up(subtract(count(program), count_compiled(program, CPU_OPTIONS)))
    sequences, heads, length, layers = 8, tiny.MODEL.num_heads, tiny.MODEL.seq_length, 5
    scores = sequences * heads * (length // 2) * length * 4  # each row of the grid holds half of T
    assert [(c.kind, c.axes, c.count, c.bytes) for c in more if c.bytes] == [
        (ALL_GATHER, ("col",), layers, layers * scores)
    ]
