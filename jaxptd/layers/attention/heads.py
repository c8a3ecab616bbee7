"""The parts that self- and cross-attention share.

Letters: B batch, T query position, S key position, D model, N heads, K heads of keys and values,
H head size.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.cudnn import Cudnn, unproven
from jaxptd.attention.kernel import Dropout, Kernel, ScoreCoordinates, Scores, with_sinks
from jaxptd.attention.obstacle import obstacle
from jaxptd.attention.xla import Xla
from jaxptd.config import AttentionKind, Config, ModelConfig, Relative
from jaxptd.config.latent import attended_sizes
from jaxptd.errors import UserError
from jaxptd.layers.dropout import TokenInfo, fold, keep_mask
from jaxptd.layers.linear import INIT, ColumnParallelLinear, RowParallelLinear, declare
from jaxptd.layers.norm import HeadNorm, WholeNorm
from jaxptd.layers.tensor_parallel import TensorParallel, separated
from jaxptd.params import Initialiser
from jaxptd.parts.parameters import HeadShape, relative_bias
from jaxptd.parts.projections import HasProjections
from jaxptd.remat import SAVED_MATMUL_IN

# ---- the kernel and the scores that a config names -----------------------------------------------


def make_kernel(config: ModelConfig) -> Kernel:
    """The attention kernel that the config names."""
    return Cudnn() if config.attention == "cudnn" else Xla(Dropout(config.dropout, keep_mask))


def make_scores(config: ModelConfig) -> Scores:
    """The scores that the config names, without a window if it is as long as the sequence."""
    window = config.block.window if config.reach < config.seq_length else None
    options, cap = config.block, config.attention_softcap
    return Scores(options.attention_scale, options.causal, window, cap)


def choose_kernel(
    config: Config, device: Any, *, documents: bool
) -> tuple[AttentionKind, str | None]:
    """Chooses the kernel by `model.attention` and the device; second, why cuDNN cannot run, if so.

    Args:
        config: the run's.
        device: one that the run uses.
        documents: whether attention is masked by document or padding.

    Raises:
        UserError: `cudnn` is requested where it cannot run.
    """
    model, layout = config.model, config.layout
    reason = obstacle(
        device.platform,
        model.dtype,
        head_sizes=attended_sizes(model, layout),
        dropout=model.dropout,
        documents=documents,
        bias=model.block.relative is not None,
        capped=model.attention_softcap is not None,
        window_in_ring=model.reach < model.seq_length and layout.ring_size > 1,
        capability=float(getattr(device, "compute_capability", 9.0)),
    )
    reason = reason or unproven()
    if layout.unfused_attention:
        reason = f"{layout.unfused_attention} has no fused attention kernel"
    if model.attention == "cudnn" and reason:
        raise UserError(f"model.attention=cudnn: {reason}; use model.attention=xla")
    return ("xla", reason) if model.attention == "xla" or reason else ("cudnn", None)


# ---- heads of queries, keys and values -----------------------------------------------------------


class Heads(nnx.Module):
    """Parameters of multi-head attention, and the steps after queries, keys and values.

    Args:
        shape: describes the projections.
        config: names the kernel and the scores.
        tensor_parallel: how matrices are sharded.
        rngs: random keys for the initial parameters.
        init_out: initialiser of the output projection.
    """

    qkv: ColumnParallelLinear | None = None  # or the next two
    q: ColumnParallelLinear | None = None
    kv: ColumnParallelLinear | None = None
    q_norm: HeadNorm | WholeNorm | None = None
    k_norm: HeadNorm | WholeNorm | None = None
    sinks: nnx.Param | None = None

    def __init__(
        self,
        shape: HasProjections,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        init_out: Initialiser,
    ) -> None:
        projections = shape.projections
        for name, column in projections.first(tensor_parallel).items():
            linear = ColumnParallelLinear.of(column, tensor_parallel=tensor_parallel, rngs=rngs)
            setattr(self, name, linear)
        own: Any = {"tensor_parallel": tensor_parallel, "rngs": rngs}
        own["options"], whole = config.block, projections.whole_norms(tensor_parallel)
        for name in ("q_norm", "k_norm") if projections.has_norm else ():
            of_head = partial(HeadNorm, projections.head_size, unit=projections.unit, **own)
            setattr(self, name, WholeNorm(whole[name], **own) if whole else of_head())
        declare(self, projections.sink_parameters(tensor_parallel), rngs)
        self.out = RowParallelLinear.of(
            projections.out(tensor_parallel),
            tensor_parallel=tensor_parallel,
            rngs=rngs,
            init=init_out,
        )
        self.unit = projections.unit
        self.gathers_kv = projections.gathers_kv(tensor_parallel)
        self.tensor_parallel, self.config, self.options = tensor_parallel, config, config.block
        self.kernel, self.scores = make_kernel(config), make_scores(config)
        some = self.scores.window is not None and not all(config.windowed)
        self.windowed = config.windowed if some else None  # by layer; None if all are alike
        some = self.scores.cap is not None and not all(config.capped)
        self.capped = config.capped if some else None  # likewise

    @property
    def local_kv_heads(self) -> int:
        """Heads of keys and values in a device's cache."""
        if self.gathers_kv:
            return max(1, self.options.num_kv_heads // self.tensor_parallel.inner_devices)
        linear = self.qkv or self.kv
        assert linear is not None
        return linear.w.shape[-2]

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and head sizes of a token's keys, and of its values, in a device's cache."""
        both = self.local_kv_heads, self.options.head_size
        return both, both

    def own_keys_values(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Keys and values of this device's heads, from the slices of all heads that it computes."""
        kv = self.tensor_parallel.axes.own_kv_heads(jnp.stack([k, v], 2), self.options.head_size)
        k, v = separated(checkpoint_name(kv, SAVED_MATMUL_IN), 2)
        return k, v

    def whole(self, x_BTNH: Array) -> Array:
        """Gathers whole heads, for attention with a cache."""
        return self.tensor_parallel.join_heads(x_BTNH, self.options.head_size)

    def attend_whole(
        self, q_BTNH: Array, k: Array, v: Array, *, coordinates: ScoreCoordinates, scores: Scores
    ) -> Array:
        """Attends with whole heads to all keys, without dropout."""
        o_BTNH, lse_BTN = Xla(Dropout(0.0, keep_mask)).fwd(q_BTNH, k, v, coordinates, scores=scores)
        if self.sinks is not None:
            o_BTNH, _ = with_sinks(o_BTNH, lse_BTN, self.sinks[...])
        return self.tensor_parallel.split_heads(o_BTNH.astype(q_BTNH.dtype), self.unit)

    def seed(self, token_info: TokenInfo, heads: int) -> Array:
        """Dropout seeds `[B, N, 2]`, one per sequence and head."""
        assert token_info.seed is not None
        return fold(
            token_info.seed,
            token_info.sample_B[:, None],
            self.tensor_parallel.axes.local_heads(heads),
        )


# ---- T5's bias by distance -----------------------------------------------------------------------
# Score biases by the distance of a key from its query, learned per bucket of distances.
#
# Letters: N heads, R distances, 2 L - 1 of L tokens.
# Source: Raffel et al., arXiv 1910.10683, section 2.1; `_relative_position_bucket` of its code.


class RelativeBias(nnx.Module):
    """A table `[buckets, N]`, sharded like the heads and shared by all layers of a stack.

    A device that holds a slice of every head holds the whole table, and its own part of the scores.

    Args:
        config: the stack's: heads, buckets, and whether it is causal.
        tensor_parallel: how heads are sharded.
        rngs: random key for the initial table.
    """

    table: nnx.Param

    def __init__(
        self, config: ModelConfig, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs
    ) -> None:
        options = config.block
        assert options.relative is not None
        heads = HeadShape(config.num_heads, options.num_kv_heads, options.head_size)
        shape = relative_bias(tensor_parallel, options.relative.buckets, heads)
        declare(self, shape, rngs, table=INIT)
        self.relative, self.causal, self.length = (
            options.relative,
            options.causal,
            config.seq_length,
        )

    def __call__(self) -> Array:
        """The bias of each distance, `[N, R]`, starting with the farthest key before a query."""
        distance_R = np.arange(1 - self.length, self.length)
        bucket_R = buckets(distance_R, self.relative, both_ways=not self.causal)
        return self.table[...][bucket_R].T


def buckets(distance_R: np.ndarray, relative: Relative, *, both_ways: bool) -> np.ndarray:
    """The bucket of each distance key - query, int32.

    Half of the buckets cover one distance each, the others ever wider ranges up to
    `relative.distance`. The logarithms are float32, as in T5's code.

    Args:
        distance_R: integers.
        relative: the number of buckets, and the distance beyond which all share the last.
        both_ways: whether keys after a query get half of the buckets; otherwise they share that of
            distance 0.
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
