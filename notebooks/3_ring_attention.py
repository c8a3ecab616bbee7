# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3. Ring attention
#
# By the end you will know how RingQK and RingAV compute attention over a sequence that no device
# holds whole, why causal attention uses a zigzag, and what a long sequence costs in memory and
# communication.

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxptd
from jaxptd import Axis, Layout
from jaxptd.ring_attention import Ring, Scores, ring_av, ring_qk

jaxptd.use_devices(8)

# %% [markdown]
# ## RingQK and RingAV, step by step
#
# Four devices each hold a quarter of the queries, keys and values. In each step a device
# multiplies its queries with the keys that it has, and passes the keys on. After n - 1 hops it
# has complete rows of scores, so the softmax is exact. Then the values travel around the ring in
# the same way.

# %% What each device multiplies in each step. K2 is the block of keys of device 2.
n = 4
visits = np.array([[(device - step) % n for step in range(n)] for device in range(n)])
figure, axes = plt.subplots(figsize=(5, 2.6))
axes.imshow(visits, cmap="Blues", vmin=-1, vmax=n)
for device in range(n):
    for step in range(n):
        axes.text(step, device, f"Q{device} K{visits[device, step]}ᵀ", ha="center", va="center")
axes.set(xticks=range(n), yticks=range(n), xlabel="step", ylabel="device", title="RingQK")
plt.show()

# %% The library's functions in a `shard_map`, compared with softmax attention on one device.
B, T, N, H = 1, 32, 2, 8
q, k, v = np.random.default_rng(0).standard_normal((3, B, T, N, H), np.float32)
layout = Layout(cp=n, ring="rsa")
mesh, ring = jaxptd.make_mesh(layout), Ring(Axis.CP, "rsa")
scores = Scores(scale=H**-0.5, causal=False)


def attention(q, k, v):
    """RSA as in its paper: complete rows of scores on each device, a plain softmax."""
    rows_BNTS = ring_qk(q, k, ring, scores)
    return ring_av(jax.nn.softmax(rows_BNTS), v, ring, scores)


sharded = P(None, Axis.CP)
ring_attention = jax.jit(jax.shard_map(attention, mesh=mesh, in_specs=sharded, out_specs=sharded))
expected = jnp.einsum(
    "BNTS,BSNH->BTNH", jax.nn.softmax(jnp.einsum("BTNH,BSNH->BNTS", q, k) * H**-0.5), v
)
print("largest difference:", float(abs(ring_attention(q, k, v) - expected).max()))

# %% [markdown]
# ## Causal attention and the zigzag
#
# A causal query does not see later keys. With contiguous blocks the last device works in every step
# and the first one in only one. In a zigzag a device has a chunk from the beginning and one from
# the end of the sequence, so all do the same work.

# %% The scores that each device computes. A point is a query and a key, its color the device.
figure, both = plt.subplots(1, 2, figsize=(8, 4))
for axes, kind in zip(both, ("blockwise", "zigzag"), strict=True):
    order = Ring(Axis.CP, kind).order(T, n)
    owner = np.empty(T, int)
    owner[order] = np.arange(T) // (T // n)
    seen = np.tril(np.ones((T, T))) > 0
    axes.imshow(np.where(seen, owner[:, None], np.nan), cmap="viridis")
    work = [int(seen[owner == device].sum()) for device in range(n)]
    axes.set(title=f"{kind}: scores a device {work}", xlabel="key", ylabel="query")
plt.show()

# %% [markdown]
# ## A long sequence
#
# The rings used in training save no scores at all: online softmax merges the blocks as they
# arrive. So what a layer saves falls as 1/cp, while a device's keys and values travel to cp - 1
# others.

# %%
model = jaxptd.ModelConfig(
    num_layers=2, hidden_size=64, num_heads=4, seq_length=1024, vocab_size=128
)
train = jaxptd.TrainConfig(global_batch_size=1)
for cp in (1, 2, 8):
    config = jaxptd.Config(model, Layout(cp=cp), train=train)
    rows = jaxptd.memory(config, compiled=False).as_dict()["rows"]
    kept = next(row["formula"] for row in rows if row["part"].startswith("a layer"))
    moved = jaxptd.comms(config, compiled=False)
    sent = sum(x.wire_bytes(moved.sizes) for x in moved.jaxpr if x.kind == "collective-permute")
    print(f"cp={cp}: a layer saves {kept:12,} bytes, a device sends {sent:12,}")

# %% Equal to one device, here with packed documents that must not see each other.
small = dataclasses.replace(model, seq_length=32, num_layers=1)
jaxptd.verify(
    jaxptd.Config(
        small, Layout(cp=4, ring="zigzag"), jaxptd.DataConfig(documents="apart"), train=train
    )
)

# %% [markdown]
# Next: [matrices in blocks on a grid](4_matrices_on_a_grid.py).
