"""Self-attention with heads, or slices of every head, sharded over devices.

Letters: B batch, T query position, S key position, D model, N heads, H head size.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxptd.attention.cudnn import Cudnn, obstacle
from jaxptd.attention.kernel import Dropout, Kernel, Sites
from jaxptd.attention.ring import Tokens
from jaxptd.attention.xla import Xla
from jaxptd.config import AttentionKind, Config, ModelConfig
from jaxptd.errors import UserError
from jaxptd.layers.dropout import Places, fold, keep_mask
from jaxptd.layers.form import TensorParallel
from jaxptd.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxptd.params import Initialiser


class Cache(NamedTuple):
    """Keys and values of the tokens so far.

    k, v: `[B, S, N, H]`, S the maximum length. used: the number of tokens stored.
    """

    k: Array
    v: Array
    used: Array

    def append(self, k_BTNH: Array, v_BTNH: Array) -> "Cache":
        put = partial(lax.dynamic_update_slice_in_dim, start_index=self.used, axis=1)
        return Cache(put(self.k, k_BTNH), put(self.v, v_BTNH), self.used + k_BTNH.shape[1])


class SelfAttention(nnx.Module):
    """Causal multi-head attention; Q, K and V come from one product, `[D, 3, N, H]`.

    The product is sharded over N: each device holds whole heads, so scores, softmax, dropout and
    context need no collective over tp or col; where the sequence is sharded, over cp or row, keys
    and values travel around a ring. Or it is sharded over H (`form.axes.head_dim`): see
    `grid_attention.py`.
    Source: Shoeybi et al., arXiv 1909.08053, section 3.
    """

    def __init__(
        self, config: ModelConfig, *, form: TensorParallel, rngs: nnx.Rngs, init_out: Initialiser
    ) -> None:
        heads = (config.num_heads, config.head_size)
        self.qkv = ColumnParallelLinear(
            config.hidden_size, (3, *heads), shard_dim=1 + form.axes.head_dim, form=form, rngs=rngs
        )
        self.out = RowParallelLinear(
            heads,
            config.hidden_size,
            shard_dim=form.axes.head_dim,
            form=form,
            rngs=rngs,
            init=init_out,
        )
        self.form, self.config = form, config

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
        q_BTNH, k_BTNH, v_BTNH = jnp.moveaxis(self.qkv(x_BTD), 2, 0)
        if cache is None:
            o_BTNH = self._attend(q_BTNH, k_BTNH, v_BTNH, places)
        else:
            q_BTNH, k_BTNH, v_BTNH = (
                self.form.join_heads(x, self.config.head_size) for x in (q_BTNH, k_BTNH, v_BTNH)
            )
            cache = cache.append(k_BTNH, v_BTNH)
            o_BTNH = self.form.split_heads(self._attend_cache(q_BTNH, cache, places))
        return self.out(o_BTNH), cache

    def _attend(self, q_BTNH: Array, k_BTNH: Array, v_BTNH: Array, places: Places) -> Array:
        tokens = Tokens(places.segment_BCT, self._seed(places, q_BTNH.shape[2]))
        kernel, head_size = make_kernel(self.config), self.config.head_size
        return self.form.attend(q_BTNH, k_BTNH, v_BTNH, tokens, kernel=kernel, head_size=head_size)

    def _attend_cache(self, q_BTNH: Array, cache: Cache, places: Places) -> Array:
        """Attends from the last tokens of a text to all cached keys, without dropout."""
        key_S = jnp.arange(cache.k.shape[1], dtype=jnp.int32)
        sites = Sites(places.position_T, key_S)
        o_BTNH, _ = Xla(Dropout(0.0, keep_mask)).fwd(q_BTNH, cache.k, cache.v, sites, causal=True)
        return o_BTNH.astype(q_BTNH.dtype)

    def _seed(self, places: Places, heads: int) -> Array | None:
        """Dropout seeds `[B, N, 2]`, one per sequence and head."""
        if places.seed is None:
            return None
        return fold(places.seed, places.sample_B[:, None], self.form.axes.local_heads(heads))


def make_kernel(config: ModelConfig) -> Kernel:
    """The attention kernel that the config names."""
    return Cudnn() if config.attention == "cudnn" else Xla(Dropout(config.dropout, keep_mask))


def choose_kernel(config: Config, device: Any) -> tuple[AttentionKind, str | None]:
    """The kernel that `model.attention` selects on a device, and why cuDNN cannot be used, if so.

    Raises:
        UserError: `cudnn` is requested where it cannot run.
    """
    model, layout = config.model, config.layout
    reason = obstacle(
        device.platform,
        model.dtype,
        head_size=model.head_size,
        dropout=model.dropout,
        documents=config.data.documents == "apart",
        capability=float(getattr(device, "compute_capability", 9.0)),
    )
    if layout.unfused_attention:
        reason = f"{layout.unfused_attention} has no fused attention kernel"
    if model.attention == "cudnn" and reason:
        raise UserError(f"model.attention=cudnn: {reason}; use model.attention=xla")
    return ("xla", reason) if model.attention == "xla" or reason else ("cudnn", None)
