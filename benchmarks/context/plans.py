"""The ways to shard one sequence that are compared; the peer gathers keys and values.

Letters: B batch, T query, S key, D model, N heads, H head size, n devices.
Source: Llama Team, arXiv 2407.21783, section 3.3.2 (all-gathered keys and values).
"""

import dataclasses
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd import ring_attention
from jaxptd.attention.kernel import Kernel, Lengths, Saved, Scores
from jaxptd.attention.ring import AttentionInputs, Ring
from jaxptd.collectives import alike
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.mesh import Layout, make_mesh
from jaxptd.remat import SAVED_MATMUL_OUT
from jaxptd.step import Program


def attend_gathered(
    q: Array,
    k: Array,
    v: Array,
    tokens: AttentionInputs,
    *,
    ring: Ring,
    kernel: Kernel,
    scores: Scores,
) -> Array:
    """Computes `ring_attention.attend` with all keys and values gathered on every device."""
    q, k, v, *_ = alike(q, k, v, lax.axis_index(ring.axis), *jax.tree.leaves(tokens))
    return _gathered(q, k, v, tokens, (ring, kernel, scores))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _gathered(q: Array, k: Array, v: Array, tokens: AttentionInputs, task: Any) -> Array:
    return _gathered_fwd(q, k, v, tokens, task)[0]


def _gathered_fwd(
    q: Array, k: Array, v: Array, tokens: AttentionInputs, task: Any
) -> tuple[Array, Any]:
    ring, kernel, scores = task
    every = lax.all_gather(jnp.stack((k, v)), ring.axis, axis=2, tiled=True)
    o, lse = kernel.fwd(
        q, *every, ring.all_coordinates(tokens, Lengths(q.shape[1], k.shape[1])), scores=scores
    )
    o, lse = checkpoint_name((o.astype(q.dtype), lse), SAVED_MATMUL_OUT)
    return o, (Saved(q, k, v, o, lse), tokens)


def _gathered_bwd(task: Any, residuals: Any, do: Array) -> tuple[Array, Array, Array, None]:
    ring, kernel, scores = task
    saved, tokens = residuals
    every = lax.all_gather(jnp.stack((saved.k, saved.v)), ring.axis, axis=2, tiled=True)
    whole = saved._replace(k=every[0], v=every[1])
    coordinates = ring.all_coordinates(tokens, Lengths(do.shape[1], saved.k.shape[1]))
    dq, dk, dv, _ = kernel.bwd(whole, do, coordinates, scores=scores)
    sums = jnp.stack((dk, dv)).astype(saved.lse.dtype)
    dk, dv = lax.psum_scatter(sums, ring.axis, scatter_dimension=2, tiled=True)
    dtype = saved.q.dtype
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype), None


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A way to shard one sequence over n devices."""

    name: str
    layout: Layout
    gathered: bool = False

    def program(self, model: ModelConfig, *, batch: int = 1) -> Program:
        train = TrainConfig(global_batch_size=batch, platform="cpu")
        return Program(Config(model, self.layout, train=train), make_mesh(self.layout))

    def patched(self) -> Any:
        """Replaces the model's attention by the plan's within the context."""
        chosen = attend_gathered if self.gathered else ring_attention.attend
        return mock.patch.object(ring_attention, "attend", chosen)


def plans(n: int) -> list[Plan]:
    """The plans that are compared, over n devices."""
    contiguous = Layout(cp=n, ring="blockwise")
    tensor = Layout(tp=n, sequence_parallel=True)
    return [
        Plan("ring, zigzag", Layout(cp=n)),
        Plan("ring, blockwise", contiguous),
        Plan("ring, rsa", Layout(cp=n, ring="rsa")),
        Plan("all-gather of k and v", contiguous, gathered=True),
        Plan("tp, sequence parallel", tensor),
        Plan("tp, keep_gathered", dataclasses.replace(tensor, keep_gathered=True)),
    ]
