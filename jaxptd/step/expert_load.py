"""Loads of experts: what a step says of them, and the biases that even them out.

The gradient of each layer's `load_bias` is the number of tokens that chose each expert
(`layers/moe.py`), summed over micro-batches and devices like any gradient.

Letters: L layers with experts, E experts.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxptd.collectives import gather_from
from jaxptd.config import Config
from jaxptd.mesh import Axis
from jaxptd.models.families import architecture_of
from jaxptd.params import Params, Stored
from jaxptd.zero.shards import ShardedInfo, on_device

LOAD, ENTROPY = "expert_load", "expert_entropy"  # names of metrics, of each layer


@jax.named_scope("optimizer")
def balanced(config: Config, params: Params, counts: Params, sound: Array) -> Params:
    """Biases by which routers choose experts, moved towards equal loads.

    By `model.moe.bias_rate`: up for an expert with fewer tokens than the mean, down for one with
    more. The mean is known, since no token is dropped, so that shards and layouts agree exactly.
    Source: Wang et al., arXiv 2408.15664.

    Args:
        config: of the run.
        params: the state's; only those of `counts` are read.
        counts: of each bias, the tokens that chose its expert.
        sound: whether the step is taken.
    """
    moe, moved = config.model.moe, {}
    assert moe is not None
    tokens = config.train.global_batch_size * config.model.seq_length
    mean = tokens * moe.top_k / moe.num_experts
    for name, count in counts.items():
        old = on_device(params[name])
        step = moe.bias_rate * jnp.sign(mean - count)
        moved[name] = jnp.where(sound, old + step.astype(old.dtype), old)
    return moved


@jax.named_scope("optimizer")
def load_metrics(config: Config, counts: Params, stored: Mapping[str, Stored]) -> dict[str, Array]:
    """The largest load over the mean, and the entropy of loads over its largest, for each layer.

    Both are 1 if all experts have as many tokens. Layers without experts have NaN. MTP modules are
    layers behind the last.

    Args:
        config: of the run.
        counts: as in `balanced`.
        stored: how the state holds each parameter.
    """
    layers = first_layers(config)
    load = jnp.full(config.model.routed_layers, jnp.nan, jnp.float32)
    entropy = load
    for name, count in counts.items():
        count_LE = _whole(count, stored[name])
        count_LE = count_LE.reshape(-1, count_LE.shape[-1])  # that of an MTP module has no L
        rows = layers[name.partition(".")[0]] + np.arange(len(count_LE))
        share_LE = count_LE / count_LE.sum(-1, keepdims=True)
        load = load.at[rows].set((share_LE.max(-1) * share_LE.shape[-1]).astype(load.dtype))
        logs_LE = jnp.where(share_LE > 0, jnp.log(jnp.maximum(share_LE, 1e-30)), 0)
        spread_L = -(share_LE * logs_LE).sum(-1) / np.log(max(share_LE.shape[-1], 2))
        entropy = entropy.at[rows].set(spread_L.astype(entropy.dtype))
    return {LOAD: load, ENTROPY: entropy}


def first_layers(config: Config) -> dict[str, int]:
    """The number of each stack's first layer in the model; MTP modules are behind the last."""
    parts = architecture_of(config.model)
    stacks: Sequence = (*parts.stacks, *parts.layers_behind)
    ends = np.cumsum([stack.layers for stack in stacks])
    return {stack.name: int(end) - stack.layers for stack, end in zip(stacks, ends, strict=True)}


def _whole(count: Array, stored: Stored) -> Array:
    """This device's block or shard of counts -> those of all layers in order, `[L, E]`."""
    info = stored.info
    if isinstance(stored, ShardedInfo):
        flat = gather_from(count, stored.holders, count.ndim - 1)
        count = stored.unflatten(flat)
    if Axis.PP in info.axes:
        count = gather_from(count, Axis.PP, 0)
    return count if info.rows is None else count[np.array(info.rows)]
