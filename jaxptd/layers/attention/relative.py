"""Biases of scores by the distance of a key from its query, learned for buckets of distances.

Letters: N heads, R distances, 2 L - 1 of L tokens.
Source: Raffel et al., arXiv 1910.10683, section 2.1; `_relative_position_bucket` of its code.
"""

import numpy as np
from flax import nnx
from jax import Array

from jaxptd.config import ModelConfig, Relative
from jaxptd.layers.attention.heads import counts_of
from jaxptd.layers.form import TensorParallel
from jaxptd.params import normal, param


class RelativeBias(nnx.Module):
    """A table `[buckets, N]`, sharded as the heads are; all layers of a stack read one.

    Where a device has a slice of every head it has the whole table, and its own part of the scores.

    Args:
        config: of the stack: its heads, its buckets, and whether it is causal.
        form: how heads are sharded.
        rngs: random key of the initial table.
    """

    def __init__(self, config: ModelConfig, *, form: TensorParallel, rngs: nnx.Rngs) -> None:
        options, axes, heads = config.block, form.axes, config.num_heads
        assert options.relative is not None
        padded = counts_of(config, form).queries
        self.table = param(
            rngs(),
            (options.relative.buckets, heads),
            normal(0.02),
            spec=(None, *axes.by_head_spec()),
            padded=(options.relative.buckets, padded),
            decay=False,
            over=axes.score_axes,
        )
        self.relative, self.causal, self.length = (
            options.relative,
            options.causal,
            config.seq_length,
        )

    def __call__(self) -> Array:
        """The bias of each distance, `[N, R]`, from the farthest key before a query on."""
        distance_R = np.arange(1 - self.length, self.length)
        bucket_R = buckets(distance_R, self.relative, both_ways=not self.causal)
        return self.table[...][bucket_R].T


def buckets(distance_R: np.ndarray, relative: Relative, *, both_ways: bool) -> np.ndarray:
    """The bucket of each distance key - query, int32.

    Half of the buckets have one distance each, the others wider and wider ranges, up to
    `relative.distance`. The logarithms are float32, as in T5's code.

    Args:
        distance_R: whole numbers.
        relative: the number of buckets, and the distance from which on all share the last.
        both_ways: keys after a query have half of the buckets; else they share that of distance 0.
    """
    count = relative.buckets // 2 if both_ways else relative.buckets
    far_R = np.abs(distance_R) if both_ways else np.maximum(-distance_R, 0)
    single = count // 2
    ratio_R = np.maximum(far_R, 1).astype(np.float32) / np.float32(single)
    wide = np.float32(np.log(relative.distance / single))
    share_R = np.log(ratio_R) / wide * np.float32(count - single)
    shared_R = np.minimum(single + share_R.astype(np.int32), count - 1)
    found_R = np.where(far_R < single, far_R, shared_R)
    return (found_R + count * (both_ways & (distance_R > 0))).astype(np.int32)
