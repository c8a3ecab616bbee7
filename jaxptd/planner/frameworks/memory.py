"""A device's memory in a framework's training step: state, activations, logits.

A formula, not a count of compiled programs. State is the framework's own, in bytes per parameter.
Layers save what this library's layers save with the same matmuls and a fused attention kernel: for
GPT with full matrices 32 bytes per token and hidden unit, which is Korthikanti et al.'s 34 s b h
(arXiv 2205.05198) without its two dropout masks.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import get_args

from jaxptd.analysis.memory_model import layer
from jaxptd.analysis.peak import OUTSIDE
from jaxptd.config import Config, ModelConfig, Remat
from jaxptd.costs.program import Parallelism
from jaxptd.layout import Layout
from jaxptd.models.families import architecture_of
from jaxptd.parts.architecture import Stack
from jaxptd.planner.cost import StepDescription
from jaxptd.planner.frameworks.framework import Framework, Setup, State, shares_table

# Share of all but the state that an allocator reserves beyond it; judged from two published steps
# of torchtitan (`tests/planner/frameworks/test_published.py`).
RESERVED = 0.05
POLICIES: tuple[Remat, ...] = get_args(Remat)
GRADIENTS = 0.5  # of one layer's activations in backward, relative to what it saves without remat


@functools.lru_cache(4096)
def saved(
    model: ModelConfig, stack: Stack, tp: int, cp: int, sequence_parallel: bool
) -> Mapping[Remat, float]:
    """Bytes that a layer saves for backward of one sequence, by policy.

    Args:
        model: of the run.
        stack: of the layer.
        tp: devices that share its matrices.
        cp: devices that share its tokens.
        sequence_parallel: whether tokens between matmuls are sharded over tp.
    """
    config = Config(
        model=dataclasses.replace(
            model, remat="none", remat_layers=None, scan_layers=False, kernels="xla"
        ),
        layout=Layout(tp=tp, cp=cp, sequence_parallel=sequence_parallel and tp > 1),
    )
    train = dataclasses.replace(config.train, global_batch_size=1, micro_batches=1)
    config = dataclasses.replace(config, train=train)
    (own,) = (s for s in architecture_of(config.padded_model).stacks if s.name == stack.name)
    return {policy: layer(config, own, policy) for policy in POLICIES}


def memory_of(
    framework: Framework, description: StepDescription, model: ModelConfig, setup: Setup
) -> dict[str, float]:
    """Bytes of the fullest device by kind.

    Args:
        framework: that trains.
        description: the step's.
        model: the config of the model.
        setup: the layout.
    """
    stages = {0, min(1, description.parallelism.pp - 1), description.parallelism.pp - 1}
    memories = (_stage(framework, description, model, setup, stage) for stage in sorted(stages))
    return max(memories, key=lambda parts: sum(parts.values()))


def _stage(
    framework: Framework,
    description: StepDescription,
    model: ModelConfig,
    setup: Setup,
    stage: int,
) -> dict[str, float]:
    """Bytes of a device of one stage."""
    parallelism, parts = description.parallelism, description.model
    stacks = {stack.name: stack for stack in parts.stacks}
    kept = working = dense = experts = 0.0
    largest = of_experts = 0.0
    for (name, remat), count in description.stages[stage].items():
        stack = stacks[name]
        chosen = stack.expert_weights / parallelism.expert_shards
        others = description.layer_parameters(stack) - chosen
        dense, experts = dense + count * others, experts + count * chosen
        largest, of_experts = max(largest, others), max(of_experts, chosen)
        by_policy = _saved(framework, model, stack, parallelism)
        one = framework.layer_bytes(description, stack, remat, by_policy)
        kept += count * one * framework.passes_held(parallelism, stage)
        working = max(working, (1 + GRADIENTS) * by_policy["none"] - one)
    tables = _tables(framework, description, stage)
    largest = max(largest, *tables)
    copies = min(parallelism.shards, parallelism.expert_copies)
    state = State(
        *map(
            sum,
            zip(
                framework.state(setup, dense + sum(tables), largest, parallelism.shards),
                framework.state(setup, experts, of_experts, copies),
                strict=True,
            ),
        )
    )
    rows = description.tokens(parts.stacks[-1]) if stage == parallelism.pp - 1 else 0
    columns = description.embedding / parts.hidden
    columns /= parallelism.inner if framework.shards_vocabulary else 1
    logits = rows * columns * framework.logit_bytes
    moment = {"logits": logits} if logits >= working else {"one layer": working}
    return {
        **state._asdict(),
        "activations": kept,
        **moment,  # the fuller one
        "allocator": RESERVED * (state.gathered + kept + max(logits, working)),
        "context, workspace, NCCL": float(sum(each.bytes for each in OUTSIDE)),
    }


def _tables(framework: Framework, description: StepDescription, stage: int) -> list[float]:
    """Elements of the table of tokens and of the head's matrix on a device of a stage."""
    parallelism, whole = description.parallelism, description.embedding
    sharded = whole / parallelism.inner
    first = [sharded if framework.shards_vocabulary else whole] if stage == 0 else []
    alone = parallelism.pp == 1 and shares_table(description.model)
    last = [sharded] if stage == parallelism.pp - 1 and not alone else []
    return [*first, *last, 0.0]


def _saved(
    framework: Framework, model: ModelConfig, stack: Stack, parallelism: Parallelism
) -> dict[Remat, float]:
    whole = framework.sequence_parallel and parallelism.sequence_parallel
    one = saved(model, stack, parallelism.tp, parallelism.cp, whole)
    return {policy: size * parallelism.micro_batch for policy, size in one.items()}
