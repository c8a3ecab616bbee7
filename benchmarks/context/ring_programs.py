"""Programs for `benchmarks.context.ring`: attention over a ring of devices, ours and the peers'.

Letters: B batch, T query, S key, N heads, H head size.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.attention.kernel import Dropout, Scores
from jaxptd.attention.ring import AttentionInputs, Ring
from jaxptd.attention.xla import Xla
from jaxptd.layers.dropout import keep_mask
from jaxptd.mesh import RingKind
from jaxptd.ring_attention import attend

CUT = P(None, "cp")  # of every array [B, T, N, H]: tokens are sharded over the ring
RINGATTENTION = "ringattention"
INSTALL = "not installed: `pip install --no-deps ringattention==0.1.2 einops`"

Attention = Callable[[Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Program:
    """One way to compute attention over the ring.

    attention: takes a device's local blocks, or, if `local` is False, whole sharded arrays.
    chunk: most queries, and keys, in one product; None: products are whole.
    kind: the order of tokens. ours: not a peer's. typed: passes `check_vma=True`.
    """

    name: str
    attention: Attention
    chunk: int | None = None
    kind: RingKind = "blockwise"
    ours: bool = False
    local: bool = True
    typed: bool = True

    def gradients(self, mesh: Mesh) -> Any:
        """Makes the jitted function `q, k, v, do -> o, dq, dk, dv`."""

        def both(q: Array, k: Array, v: Array, do: Array) -> tuple[Array, ...]:
            o, backward = jax.vjp(self.attention, q, k, v)
            return o, *backward(do)

        if self.local:
            specs = {"in_specs": (CUT,) * 4, "out_specs": (CUT,) * 4}
            return jax.jit(jax.shard_map(both, mesh=mesh, **specs, check_vma=self.typed))
        cut = NamedSharding(mesh, CUT)
        return jax.jit(both, in_shardings=cut, out_shardings=cut)


# ---- the programs ---------------------------------------------------------------------------


def ours(kind: RingKind, chunk: int | None) -> Program:
    """jaxptd's attention, with the kernel of matrix products in chunks."""
    kernel = Xla(Dropout(0.0, keep_mask), chunk or 1)  # RSA does not use the kernel
    ring = Ring("cp", kind)

    def attention(q: Array, k: Array, v: Array) -> Array:
        return attend(
            q, k, v, AttentionInputs(), ring=ring, kernel=kernel, scores=Scores(q.shape[-1] ** -0.5)
        )

    return Program(f"jaxptd {kind}", attention, chunk, kind, ours=True)


def gather() -> Program:
    """The peer that gathers all keys and values on every device."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        k, v = (lax.all_gather(x, "cp", axis=1, tiled=True) for x in (k, v))
        query_T = Ring("cp", "blockwise").positions(q.shape[1])
        seen_TS = query_T[:, None] >= jnp.arange(k.shape[1])
        return jax.nn.dot_product_attention(q, k, v, mask=seen_TS[None, None], implementation="xla")

    return Program("gather", attention)


def partitioned(mesh: Mesh) -> Program:
    """The peer of XLA's partitioner: queries and outputs are sharded, keys and values are not."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        keep = partial(lax.with_sharding_constraint, shardings=NamedSharding(mesh, CUT))
        k, v = (lax.with_sharding_constraint(x, NamedSharding(mesh, P())) for x in (k, v))
        return keep(
            jax.nn.dot_product_attention(keep(q), k, v, is_causal=True, implementation="xla")
        )

    return Program("jit", attention, local=False)


def ringattention(chunk: int) -> Program | None:
    """The peer of the package ringattention, or None if it is not installed."""
    module = _module()
    if module is None:
        return None

    def attention(q: Array, k: Array, v: Array) -> Array:
        size = min(chunk, q.shape[1])
        options = {
            "causal_block_size": 1,
            "deterministic": True,
            "dropout_rng": None,
            "attn_pdrop": 0.0,
            "query_chunk_size": size,
            "key_chunk_size": size,
            "dtype": jnp.float32,
            "policy": jax.checkpoint_policies.nothing_saveable,
            "precision": None,
            "prevent_cse": False,  # not needed inside a scan
        }
        return module.ring_attention(q, k, v, None, None, None, "cp", True, options)

    return Program(RINGATTENTION, attention, chunk, typed=False)


def _module() -> ModuleType | None:
    """Imports only `ringattention.ringattention_jax`: the package needs a JAX older than 0.8."""
    package = importlib.util.find_spec(RINGATTENTION)
    if package is None or package.origin is None or not importlib.util.find_spec("einops"):
        return None
    path = Path(package.origin).with_name("ringattention_jax.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def programs(mesh: Mesh, chunks: Sequence[int]) -> Iterator[Program]:
    """Yields all programs; those with chunks once for each chunk."""
    for chunk in chunks:
        yield ours("zigzag", chunk)
        yield ours("blockwise", chunk)
    yield ours("rsa", None)
    yield gather()
    yield partitioned(mesh)
    yield from filter(None, map(ringattention, chunks))
