"""Records of programs with published step times: what each did, from its documentation.

`accumulate` 6: reads a 16-bit sum and gradient and writes a sum. `update` of mixed precision in
float16: gradients to float32 (6, unless they are already), unscaling and check (8), clipping (8),
Adam over parameter, two moments and gradient (28), 16-bit parameters (6), zeroing gradients (4). In
bfloat16 nothing is unscaled. `logit` of Megatron-LM's vocabulary-parallel loss: to float32 (6),
maximum (4), difference (8), exponential and sum (12), quotient (8), gradient (8), to 16 bits (6).
"""

import dataclasses
import types
from collections.abc import Iterable, Mapping

from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jaxptd.costs.program import Implementation
from jaxptd.planner.cost import Placed, StepDescription
from jaxptd.planner.cost.collectives import Under
from jaxptd.planner.steps.implementation import ADDED

# Narayanan et al., arXiv 2104.04473, and Megatron-LM's examples/sc21: float16, unfused attention,
# DDP=torch without a pipeline (gradients are reduced during backward) and DDP=local with one.
MEGATRON_2021 = Implementation(
    "megatron-2021",
    attention="unfused",
    dropout=True,
    bias=True,
    rotary=False,
    accumulate=6,
    gradient=2,
    update=60,
    logit=52,
    tp_under="nothing",
    dp_under="backward without a pipeline",
    sends_hidden=False,
    sends_sharded=True,
)
# Korthikanti et al., arXiv 2205.05198, and Megatron-LM of that time: weight-gradient matmuls
# accumulate in float32, and backward's tensor-parallel collectives overlap matmuls.
MEGATRON_2022 = dataclasses.replace(
    MEGATRON_2021,
    name="megatron-2022",
    accumulate=0,
    gradient=4,
    update=54,
    tp_under="weight gradients",
)
# NVIDIA NeMo with Transformer Engine: flash attention, Llama's block, collectives in pieces that
# overlap matmuls; gradients overlap backward and parameters overlap forward.
NEMO = Implementation(
    "nemo",
    attention="flash",
    dropout=False,
    bias=False,
    rotary=True,
    accumulate=0,
    gradient=2,
    update=40,
    logit=40,
    tp_under="products",
    dp_under="backward",
    sends_hidden=True,
    sends_sharded=False,
)
# MaxText: XLA's fusions and latency-hiding scheduler; gradient accumulation reads and writes
# float32 and reads 16 bits.
MAXTEXT = dataclasses.replace(
    NEMO, name="maxtext", accumulate=10, tp_under="weight gradients", sends_hidden=False
)
# jaxptd without its compiled schedule: all collectives are exposed, gradients are sent in float32.
JAXPTD = dataclasses.replace(
    NEMO,
    name="jaxptd",
    accumulate=ADDED,
    gradient=4,
    tp_under="nothing",
    dp_under="nothing",
    sends_hidden=False,
)

PROGRAMS: Mapping[str, Implementation] = types.MappingProxyType(
    {program.name: program for program in (JAXPTD, MEGATRON_2021, MEGATRON_2022, NEMO, MAXTEXT)}
)


# ---- collectives of published programs, from the records of what they did ------------------------
# Bytes are of whole arrays in 16 bits: x[T, D] of a micro-batch. Per layer, tensor parallelism
# all-reduces x twice forward and twice backward. With sequence parallelism each of these becomes a
# gather and a reduce-scatter, and backward gathers twice more for weight gradients.
#
# Sources: Narayanan et al., arXiv 2104.04473; Korthikanti et al., arXiv 2205.05198.

TP, BATCH = ("tp",), ("cp", "dp")


def published_collectives(description: StepDescription) -> list[Placed]:
    """All collectives of a step, except messages between stages."""
    placed = [
        *_tensor_parallel(description),
        *_ring(description),
        *_state(description),
        *_tied(description),
    ]
    return [each for each in placed if description.parallelism.group(each.axes).members > 1]


def _tensor_parallel(description: StepDescription) -> list[Placed]:
    (stack,) = description.model.stacks
    x = 2.0 * description.tokens(stack) * description.model.hidden
    whole = description.parallelism.remat == "full"
    layers = (
        _sharded_sums(description, x)
        if description.parallelism.sequence_parallel
        else _sums(description, x)
    )
    again = [
        each._replace(name=f"{each.name} again", place="backward")
        for each in layers
        if each.place == "forward" and whole
    ]
    ends = [
        Placed("embedding summed", ALL_REDUCE, TP, 1, x, "first"),
        Placed("gradient of logits' input", ALL_REDUCE, TP, 1, x, "last"),
    ]
    return [*layers, *again, *ends]


def _sums(description: StepDescription, x: float) -> list[Placed]:
    program = description.implementation
    forward: Under = "products" if program.tp_under == "products" else "nothing"
    return [
        Placed("sums forward", ALL_REDUCE, TP, 2, x, "forward", forward),
        Placed("sums backward", ALL_REDUCE, TP, 2, x, "backward", program.tp_under),
    ]


def _sharded_sums(description: StepDescription, x: float) -> list[Placed]:
    """All-reduces in halves. In backward only the gather before a row matmul is always exposed."""
    under = description.implementation.tp_under
    forward: Under = "products" if under == "products" else "nothing"
    again: Under = "input gradients" if under == "weight gradients" else under
    return [
        Placed("gathers forward", ALL_GATHER, TP, 2, x, "forward", forward),
        Placed("scatters forward", REDUCE_SCATTER, TP, 2, x, "forward", forward),
        Placed("gathers of gradients", ALL_GATHER, TP, 2, x, "backward", forward),
        Placed("gathers again for weights", ALL_GATHER, TP, 2, x, "backward", again),
        Placed("scatters backward", REDUCE_SCATTER, TP, 2, x, "backward", under),
    ]


def _ring(description: StepDescription) -> Iterable[Placed]:
    """Keys and values of a ring; backward moves them again, with their gradients."""
    (stack,), parallelism = description.model.stacks, description.parallelism
    heads = 2 * sum(part.key_columns for part in stack.parts) / parallelism.tp
    size = 2.0 * description.tokens(stack) * parallelism.cp * heads
    yield Placed("keys and values", ALL_GATHER, ("cp",), 1, size, "forward", "attention")
    yield Placed("keys and values again", ALL_GATHER, ("cp",), 1, size, "backward", "attention")
    yield Placed("their gradients", REDUCE_SCATTER, ("cp",), 1, size, "backward", "attention")


def _state(description: StepDescription) -> list[Placed]:
    """Gradients and parameters over dp x ep x cp, by ZeRO stage."""
    parallelism, program = description.parallelism, description.implementation
    hidden = program.dp_under == "backward" or (
        program.dp_under != "nothing" and parallelism.pp == 1
    )
    under: Under = "last backward" if hidden else "nothing"
    gradients, weights = (
        program.gradient * description.stage_parameters,
        2 * description.stage_parameters,
    )
    if parallelism.zero == 3:
        return _gathered(description)
    if parallelism.zero:
        return [
            Placed("gradients", REDUCE_SCATTER, BATCH, 1, gradients, "step", under),
            Placed("parameters", ALL_GATHER, BATCH, 1, weights, "step", under),
        ]
    return [Placed("gradients", ALL_REDUCE, BATCH, 1, gradients, "step", under)]


def _gathered(description: StepDescription) -> list[Placed]:
    """ZeRO 3: each layer's weights before it runs, forward and backward; gradients after it."""
    (stack,) = description.model.stacks
    layer = description.layer_parameters(stack)
    weights, gradients = 2 * layer, description.implementation.gradient * layer
    shard = (
        description.implementation.gradient
        * description.stage_parameters
        / description.parallelism.shards
    )
    return [
        Placed("weights", ALL_GATHER, ("shard",), 1, weights, "forward", "layer"),
        Placed("weights again", ALL_GATHER, ("shard",), 1, weights, "backward", "layer"),
        Placed("gradients", REDUCE_SCATTER, ("shard",), 1, gradients, "backward", "layer"),
        Placed("gradients of copies", ALL_REDUCE, ("replica",), 1, shard, "step"),
    ]


def _tied(description: StepDescription) -> list[Placed]:
    """The gradient of the embedding, which the first and the last stage share."""
    if description.parallelism.pp == 1:
        return []
    size = description.implementation.gradient * description.embedding / description.parallelism.tp
    return [Placed("gradient of the embedding", ALL_REDUCE, ("ends",), 1, size, "step")]
