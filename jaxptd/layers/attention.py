"""Self-attention with heads, or slices of every head, sharded over devices.

Letters: B batch, T query position, S key position, D model, N heads, K heads of keys and values,
H head size.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.cudnn import Cudnn, obstacle
from jaxptd.attention.kernel import TAKEN, Dropout, Kernel, Scores, Sites
from jaxptd.attention.ring import Tokens
from jaxptd.attention.rope import rotate
from jaxptd.attention.xla import Xla
from jaxptd.config import AttentionKind, Config, ModelConfig
from jaxptd.config.rope import frequencies
from jaxptd.errors import UserError
from jaxptd.layers.dropout import Places, fold, keep_mask
from jaxptd.layers.form import TensorParallel
from jaxptd.layers.linear import ColumnParallelLinear, RowParallelLinear, multiply
from jaxptd.layers.norm import HeadNorm
from jaxptd.params import Initialiser


class Cache(NamedTuple):
    """Keys and values of the tokens so far.

    k, v: `[B, S, K, H]`, S the maximum length. used: the number of tokens stored.
    """

    k: Array
    v: Array
    used: Array

    def append(self, k_BTKH: Array, v_BTKH: Array) -> "Cache":
        put = partial(lax.dynamic_update_slice_in_dim, start_index=self.used, axis=1)
        return Cache(put(self.k, k_BTKH), put(self.v, v_BTKH), self.used + k_BTKH.shape[1])


class SelfAttention(nnx.Module):
    """Multi-head attention, causal or not; Q, K and V come from one product.

    Its weight is `[D, 3, N, H]`, or, where groups of heads share keys and values, `[D, N, H]` and
    `[D, 2, K, H]`. The product is sharded over N and K: each device holds whole heads, so scores,
    softmax, dropout and context need no collective over tp or col; where the sequence is sharded,
    over cp or row, keys and values travel around a ring. Or it is sharded over H
    (`form.axes.head_dim`): see `grid_attention.py`. Where K does not split, keys and values are
    sharded over H, and gathered.

    Source: Shoeybi et al., arXiv 1909.08053, section 3; Ainslie et al., arXiv 2305.13245 (groups).
    """

    def __init__(
        self, config: ModelConfig, *, form: TensorParallel, rngs: nnx.Rngs, init_out: Initialiser
    ) -> None:
        options, dim = config.block, form.axes.head_dim
        kv_heads, size = options.num_kv_heads, options.head_size
        self.unit = options.head_unit if dim else 1
        groups = kv_heads < config.num_heads
        self.gathers_kv = groups and not dim and form.padded(kv_heads, each=size) != kv_heads
        linear = partial(
            ColumnParallelLinear,
            config.hidden_size,
            form=form,
            rngs=rngs,
            unit=self.unit,
            bias=options.linear_bias != "none",
        )
        self.qkv = None if groups else linear((3, kv_heads, size), shard_dim=1 + dim)
        self.q = linear((config.num_heads, size), shard_dim=dim) if groups else None
        kv_dim = 2 if self.gathers_kv else 1 + dim
        self.kv = linear((2, kv_heads, size), shard_dim=kv_dim) if groups else None
        norm = partial(HeadNorm, size, options=options, form=form, rngs=rngs, unit=self.unit)
        self.q_norm = norm() if options.qk_norm else None
        self.k_norm = norm() if options.qk_norm else None
        self.out = RowParallelLinear(
            (config.num_heads, size),
            config.hidden_size,
            shard_dim=dim,
            unit=self.unit,
            form=form,
            rngs=rngs,
            bias=options.linear_bias == "all",
            init=init_out,
        )
        self.form, self.config = form, config

    @property
    def local_kv_heads(self) -> int:
        """Heads of keys and values that a device has in its cache."""
        if self.gathers_kv:
            return max(1, self.config.block.num_kv_heads // self.form.inner_devices)
        linear = self.qkv or self.kv
        assert linear is not None
        return linear.w.shape[-2]

    @jax.named_scope("attention")
    def __call__(
        self, x_BTD: Array, places: Places, cache: Cache | None
    ) -> tuple[Array, Cache | None]:
        """x as the residual stream has it -> the same, and the cache with x's keys and values.

        Args:
            x_BTD: the residual stream.
            places: its tokens, and the seed for dropout of this layer's probabilities.
            cache: keys and values of the tokens before these, or None.
        """
        if self.qkv is not None:
            q_BTNH, k_BTKH, v_BTKH = jnp.moveaxis(self.qkv(x_BTD), 2, 0)
        else:
            q_BTNH, k_BTKH, v_BTKH = self._groups(x_BTD)
        q_BTNH = self._placed(q_BTNH, self.q_norm, places)
        k_BTKH = self._placed(k_BTKH, self.k_norm, places)
        if cache is None:
            o_BTNH = self._attend(q_BTNH, k_BTKH, v_BTKH, places)
        else:
            q_BTNH, k_BTKH, v_BTKH = (
                self.form.join_heads(x, self.config.block.head_size)
                for x in (q_BTNH, k_BTKH, v_BTKH)
            )
            cache = cache.append(k_BTKH, v_BTKH)
            o_BTNH = self._attend_cache(q_BTNH, cache, places)
            o_BTNH = self.form.split_heads(o_BTNH, self.unit)
        return self.out(o_BTNH), cache

    def _groups(self, x_BTD: Array) -> tuple[Array, Array, Array]:
        """Queries, and the keys and values of their groups."""
        assert self.q is not None and self.kv is not None
        q_BTNH, kv = multiply(x_BTD, self.q, self.kv)
        if self.gathers_kv:
            kv = self.form.axes.own_kv_heads(kv, self.config.block.head_size)
            kv = checkpoint_name(kv, TAKEN)
        k_BTKH, v_BTKH = jnp.moveaxis(kv, 2, 0)
        return q_BTNH, k_BTKH, v_BTKH

    def _placed(self, x_BTNH: Array, norm: HeadNorm | None, places: Places) -> Array:
        """Queries or keys, normalised and turned by their positions, if the model does so."""
        options, axes = self.config.block, self.form.axes
        x_BTNH = x_BTNH if norm is None else norm(x_BTNH)
        if options.rope is None:
            return x_BTNH
        position_T = axes.local_logit_tokens(places.position_T[None])[0]
        number_H = axes.local_head_numbers(x_BTNH.shape[-1])
        turns, length = frequencies(options.rope, options.head_size)
        return rotate(x_BTNH, position_T, number_H, turns=turns, length=length)

    def _attend(self, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, places: Places) -> Array:
        tokens = Tokens(places.segment_BCT, places.segment_BCT, self._seed(places, q_BTNH.shape[2]))
        kernel, scores = make_kernel(self.config), make_scores(self.config)
        return self.form.attend(q_BTNH, k_BTKH, v_BTKH, tokens, kernel=kernel, scores=scores)

    def _attend_cache(self, q_BTNH: Array, cache: Cache, places: Places) -> Array:
        """Attends from the last tokens of a text to all cached keys, without dropout."""
        key_S = jnp.arange(cache.k.shape[1], dtype=jnp.int32)
        sites, scores = Sites(places.position_T, key_S), make_scores(self.config)
        o_BTNH, _ = Xla(Dropout(0.0, keep_mask)).fwd(q_BTNH, cache.k, cache.v, sites, scores=scores)
        return o_BTNH.astype(q_BTNH.dtype)

    def _seed(self, places: Places, heads: int) -> Array | None:
        """Dropout seeds `[B, N, 2]`, one per sequence and head."""
        if places.seed is None:
            return None
        return fold(places.seed, places.sample_B[:, None], self.form.axes.local_heads(heads))


def make_kernel(config: ModelConfig) -> Kernel:
    """The attention kernel that the config names."""
    return Cudnn() if config.attention == "cudnn" else Xla(Dropout(config.dropout, keep_mask))


def make_scores(config: ModelConfig) -> Scores:
    """The scores that the config names; a window as long as the sequence is none."""
    window = config.block.window if config.reach < config.seq_length else None
    return Scores(config.block.attention_scale, config.block.causal, window)


def choose_kernel(config: Config, device: Any) -> tuple[AttentionKind, str | None]:
    """The kernel that `model.attention` selects on a device, and why cuDNN cannot be used, if so.

    Raises:
        UserError: `cudnn` is requested where it cannot run.
    """
    model, layout = config.model, config.layout
    reason = obstacle(
        device.platform,
        model.dtype,
        head_size=model.block.head_size,
        dropout=model.dropout,
        documents=config.data.documents == "apart",
        window_in_ring=model.reach < model.seq_length and layout.ring_size > 1,
        capability=float(getattr(device, "compute_capability", 9.0)),
    )
    if layout.unfused_attention:
        reason = f"{layout.unfused_attention} has no fused attention kernel"
    if model.attention == "cudnn" and reason:
        raise UserError(f"model.attention=cudnn: {reason}; use model.attention=xla")
    return ("xla", reason) if model.attention == "xla" or reason else ("cudnn", None)
