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

from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from jaxptd.costs.program import Implementation, Parallelism
from jaxptd.parts.part import Part
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
# overlap matmuls; gradients overlap backward and parameters overlap forward. `expert_pace` of this
# and other programs: set by one published row of each (benchmarks/published).
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
    expert_pace=0.89,
)
# MaxText: XLA's fusions and latency-hiding scheduler; gradient accumulation reads and writes
# float32 and reads 16 bits. Recipes for dense models of 70 billion parameters save the results of
# attention's four matmuls and of the MLP's last one (`remat_policy: custom`, tag v25.01 of
# NVIDIA/dgxc-benchmarking, maxtext/configure.sh), here called `dots`.
MAXTEXT = dataclasses.replace(
    NEMO,
    name="maxtext",
    accumulate=10,
    accumulates=False,
    tp_under="weight gradients",
    sends_hidden=False,
    again_all=False,
    expert_pace=1.0,
    dots_again=("mlp in", "attention"),
)
# NeMo Automodel: PyTorch's FSDP2, with experts' tokens sent by DeepEP. Recomputing a block stops
# when all that backward needs is there (torch.utils.checkpoint, early stop).
AUTOMODEL = dataclasses.replace(
    NEMO,
    name="automodel",
    tp_under="nothing",
    sends_hidden=False,
    again_all=False,
    expert_pace=1.12,
)
# Marin's Grug: JAX with ZeRO 3, and experts by grouped kernels written in Pallas.
MARIN = dataclasses.replace(MAXTEXT, name="marin", dots_again=(), expert_pace=0.5)
# jaxptd without its compiled schedule: all collectives are exposed, gradients are sent in float32.
JAXPTD = dataclasses.replace(
    NEMO,
    name="jaxptd",
    accumulate=ADDED,
    gradient=4,
    tp_under="nothing",
    dp_under="nothing",
    sends_hidden=False,
    experts_again=True,
    expert_pace=1.0,
)

MEGATRON = dataclasses.replace(NEMO, name="megatron")
_PROGRAMS = (*(JAXPTD, MEGATRON_2021, MEGATRON_2022, MEGATRON, NEMO, AUTOMODEL, MAXTEXT, MARIN),)
# MaxText's own policies -> what backward runs again (base.yml, `remat_policy`).
MAXTEXT_POLICIES: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "minimal": ("attention",),
        "minimal_flash": (),
        "minimal_with_context": (),
        "save_dot_except_mlpwi": ("mlp in", "attention"),
        "save_dot_except_mlp": ("mlp in", "mlp out", "attention"),
        "save_dot_with_context_except_mlp": ("mlp in", "mlp out"),
        "save_qkv_proj": ("attention output", "mlp in", "attention"),
    }
)

PROGRAMS: Mapping[str, Implementation] = types.MappingProxyType(
    {program.name: program for program in _PROGRAMS}
)


def record_of(program: str, parallelism: Parallelism, policy: str = "") -> Implementation:
    """The record of a program for a layout.

    Args:
        program: one of `PROGRAMS`.
        parallelism: the layout.
        policy: one of `MAXTEXT_POLICIES`, in place of what the program calls `dots`; empty: none.
    """
    record = PROGRAMS[program]
    once = parallelism.micro_batches == 1 or parallelism.zero == 3
    if once and not record.accumulates:
        record = dataclasses.replace(record, accumulate=0)
    if policy:
        record = dataclasses.replace(record, dots_again=MAXTEXT_POLICIES[policy])
    return record


# ---- collectives of published programs, from the records of what they did ------------------------
# Bytes are of whole arrays in 16 bits: x[T, D] of a micro-batch. Per layer, tensor parallelism
# all-reduces x twice forward and twice backward. With sequence parallelism each of these becomes a
# gather and a reduce-scatter, and backward gathers twice more for weight gradients.
#
# Sources: Narayanan et al., arXiv 2104.04473; Korthikanti et al., arXiv 2205.05198.

TP, BATCH, SHARD = ("tp",), ("cp", "dp"), ("shard",)


def published_collectives(description: StepDescription) -> list[Placed]:
    """All collectives of a step, except messages between stages."""
    placed = [
        *_tensor_parallel(description),
        *_dispatch(description),
        *_ring(description),
        *_state(description),
        *_tied(description),
    ]
    return [each for each in placed if description.parallelism.group(each.axes).members > 1]


def _tensor_parallel(description: StepDescription) -> list[Placed]:
    """The sums of matrices that tp shares; experts that it does not share have none."""
    x = 2.0 * description.tokens(description.model.stacks[0]) * description.model.hidden
    placed = []
    for stack in description.model.stacks:
        times = sum(part.is_shared(description.parallelism.expert_slices) for part in stack.parts)
        layers = _sums(description, x, times)
        if description.parallelism.sequence_parallel:
            layers = _sharded_sums(description, x, times)
        if description.parallelism.remat == "full":
            forward = [each for each in layers if each.place == "forward"]
            layers += [e._replace(name=f"{e.name} again", place="backward") for e in forward]
        placed += [each._replace(stack=stack.name) for each in layers]
    return [
        *placed,
        Placed("embedding summed", ALL_REDUCE, TP, 1, x, "first"),
        Placed("gradient of logits' input", ALL_REDUCE, TP, 1, x, "last"),
    ]


def _sums(description: StepDescription, x: float, times: int) -> list[Placed]:
    program = description.implementation
    forward: Under = "products" if program.tp_under == "products" else "nothing"
    return [
        Placed("sums forward", ALL_REDUCE, TP, times, x, "forward", forward),
        Placed("sums backward", ALL_REDUCE, TP, times, x, "backward", program.tp_under),
    ]


def _sharded_sums(description: StepDescription, x: float, times: int) -> list[Placed]:
    """All-reduces in halves. In backward only the gather before a row matmul is always exposed."""
    under = description.implementation.tp_under
    forward: Under = "products" if under == "products" else "nothing"
    again: Under = "input gradients" if under == "weight gradients" else under
    return [
        Placed("gathers forward", ALL_GATHER, TP, times, x, "forward", forward),
        Placed("scatters forward", REDUCE_SCATTER, TP, times, x, "forward", forward),
        Placed("gathers of gradients", ALL_GATHER, TP, times, x, "backward", forward),
        Placed("gathers again for weights", ALL_GATHER, TP, times, x, "backward", again),
        Placed("scatters backward", REDUCE_SCATTER, TP, times, x, "backward", under),
    ]


# ---- tokens to experts and back ------------------------------------------------------------------

EXPERTS, COPIES = ("experts",), ("expert copies",)
# Shares of a dispatch that run under other kernels: HybridEP's in Megatron-Bridge's performance
# guide for experts, where the overlap is switched on.
HIDDEN: Mapping[str, float] = types.MappingProxyType({"hybridep": 0.3655})


def _dispatch(description: StepDescription) -> Iterable[Placed]:
    """Tokens to their experts and sums back, forward and, as gradients, backward.

    Recomputing a layer sends tokens again, and sums only if it repeats the layer's last matmul.
    """
    parallelism, again_all = description.parallelism, description.implementation.again_all
    exposed, again = 1 - HIDDEN.get(parallelism.dispatch, 0.0), parallelism.remat == "full"
    for stack in description.model.stacks:
        for part in stack.parts:
            if not part.routes:
                continue
            kinds, size = _message(description, part, description.tokens(stack))
            for kind, name, repeated in zip(
                kinds,
                ("tokens to experts", "sums of experts"),
                (again, again and again_all),
                strict=True,
            ):
                there = Placed(name, kind, EXPERTS, exposed, size, "forward", stack=stack.name)
                yield there
                back = exposed * (1 + repeated)
                yield there._replace(name=f"{name}, back", count=back, place="backward")


def _message(
    description: StepDescription, part: Part, tokens: int
) -> tuple[tuple[str, str], float]:
    """The collectives there and back, and their bytes.

    An all-to-all sends a copy of a token for each of its experts; DeepEP and HybridEP one for each
    device that has some of them, and between nodes one for each node. Links within a node and
    between nodes work at the same time, so the slower of them counts, in bytes of the network.

    Source: DeepSeek-AI, arXiv 2412.19437, section 3.2 (a token once to each node).
    """
    parallelism, cluster = description.parallelism, description.cluster
    group, own = parallelism.group(EXPERTS), tokens / parallelism.tp * parallelism.expert_slices
    row, links = 2.0 * own * part.hidden, cluster.links(group)
    if parallelism.dispatch == "allgather":
        return (ALL_GATHER, REDUCE_SCATTER), row * group.members
    each = parallelism.dispatch == "alltoall"
    devices = part.copies_sent(None if each else group.members)
    nodes = part.copies_sent(None if each else links.nodes)
    row *= parallelism.imbalance
    beyond = nodes * (links.nodes - 1) / links.nodes
    if parallelism.dispatch == "alltoall":
        inside = devices * (links.local - 1) / group.members
    else:
        inside = devices * (group.members - 1) / group.members
    if links.nodes == 1:
        return (ALL_TO_ALL, ALL_TO_ALL), row * inside
    a = cluster.accelerator
    slower = a.nvlink_bandwidth * a.nvlink_share / cluster.rail
    return (ALL_TO_ALL, ALL_TO_ALL), row * max(beyond, inside / slower)


def _ring(description: StepDescription) -> Iterable[Placed]:
    """Keys and values of a ring; backward moves them again, with their gradients."""
    stack, parallelism = description.model.stacks[0], description.parallelism
    heads = 2 * sum(part.key_columns for part in stack.parts) / parallelism.tp
    size = 2.0 * description.tokens(stack) * parallelism.cp * heads
    yield Placed("keys and values", ALL_GATHER, ("cp",), 1, size, "forward", "attention")
    yield Placed("keys and values again", ALL_GATHER, ("cp",), 1, size, "backward", "attention")
    yield Placed("their gradients", REDUCE_SCATTER, ("cp",), 1, size, "backward", "attention")


def _state(description: StepDescription) -> Iterable[Placed]:
    """Gradients and parameters over dp x ep x cp, by ZeRO stage; those of experts over copies."""
    parallelism, program = description.parallelism, description.implementation
    hidden = program.dp_under == "backward" or (
        program.dp_under != "nothing" and parallelism.pp == 1
    )
    under: Under = "last backward" if hidden else "nothing"
    if parallelism.zero == 3:
        yield from _gathered(description)
        return
    experts = description.stage_experts
    for of, axes, elements in (
        ("", BATCH, description.stage_parameters - experts),
        (" of experts", COPIES, experts),
    ):
        gradients, weights = program.gradient * elements, 2 * elements
        if not elements:
            continue
        if parallelism.zero:
            yield Placed(f"gradients{of}", REDUCE_SCATTER, axes, 1, gradients, "step", under)
            yield Placed(f"parameters{of}", ALL_GATHER, axes, 1, weights, "step", under)
        else:
            yield Placed(f"gradients{of}", ALL_REDUCE, axes, 1, gradients, "step", under)


def _gathered(description: StepDescription) -> Iterable[Placed]:
    """ZeRO 3: each layer's weights before it runs, forward and backward; gradients after it."""
    parallelism, gradient = description.parallelism, description.implementation.gradient
    for stack in description.model.stacks:
        experts = stack.expert_weights / parallelism.expert_shards
        for of, axes, elements in (
            ("", SHARD, description.layer_parameters(stack) - experts),
            (" of experts", COPIES if parallelism.expert_devices > 1 else SHARD, experts),
        ):
            if elements:
                yield from _gathered_layer(f"{of}", axes, elements, gradient, stack.name)
    shard = gradient * description.stage_parameters / parallelism.shards
    yield Placed("gradients of copies", ALL_REDUCE, ("replica",), 1, shard, "step")


def _gathered_layer(
    of: str, axes: tuple[str, ...], elements: float, gradient: int, stack: str
) -> Iterable[Placed]:
    """The collectives of a layer's weights."""
    weights = 2 * elements
    yield Placed(f"weights{of}", ALL_GATHER, axes, 1, weights, "forward", "layer", stack)
    yield Placed(f"weights{of} again", ALL_GATHER, axes, 1, weights, "backward", "layer", stack)
    gradients = gradient * elements
    yield Placed(f"gradients{of}", REDUCE_SCATTER, axes, 1, gradients, "backward", "layer", stack)


def _tied(description: StepDescription) -> list[Placed]:
    """The gradient of the embedding, which the first and the last stage share."""
    if description.parallelism.pp == 1:
        return []
    size = description.implementation.gradient * description.embedding / description.parallelism.tp
    return [Placed("gradient of the embedding", ALL_REDUCE, ("ends",), 1, size, "step")]
