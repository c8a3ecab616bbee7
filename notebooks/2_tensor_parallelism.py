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
# # 2. Meshes and tensor parallelism
#
# By the end you will know what a mesh is, which block of each matrix a device holds under tensor
# parallelism, what a step moves, and how to check that against the formula.

# %%
import jax

import jaxptd
from jaxptd import Layout, plot

jaxptd.use_devices(8)

# %% [markdown]
# ## A mesh
#
# The devices form a grid with named axes. A layout gives their sizes: here two replicas of the
# model, each on four devices. Neighbours along `tp` communicate most, so they are neighbours in
# the machine.

# %%
layout = Layout(dp=2, tp=4)
plot.mesh(layout)

# %% The devices that sum gradients together (dp), and those that share a matrix (tp).
for name, groups in jaxptd.rank_groups(layout).items():
    print(f"{name:12} {groups}")

# %% [markdown]
# ## What a device holds
#
# Megatron's tensor parallelism shards the first matrix of a pair by columns and the second by rows,
# so that nothing moves between the two matmuls. The spec of each parameter shows it: `tp` is at
# the sharded dim.

# %%
model = jaxptd.ModelConfig(num_layers=2, hidden_size=32, num_heads=4, seq_length=32, vocab_size=128)
config = jaxptd.Config(model, layout, train=jaxptd.TrainConfig(global_batch_size=8))
program = jaxptd.Program(config, jaxptd.make_mesh(layout))
state = program.init_state()

for name, array in state["params"].items():
    block = array.addressable_shards[0].data.shape
    print(f"{name:28} {array.shape!s:18} a device: {block!s:18} {array.sharding.spec}")

# %% The same as a picture: each part of a matrix is labelled with the number of its device.
for name in ("blocks.mlp.up.w", "blocks.mlp.down.w"):
    print(name)
    jax.debug.visualize_array_sharding(state["params"][name][0])

# %% [markdown]
# ## What moves
#
# `comms` traces the training step and counts its collectives. Here each layer all-reduces
# `x[B, T, D]` over tp twice in forward and twice in backward. Once per step every gradient is
# all-reduced over dp. The program moves exactly the bytes of the formula.

# %%
found = jaxptd.comms(config)
found

# %%
plot.bytes_by_axis(found)

# %% [markdown]
# ## Sequence parallelism
#
# Between the pairs of matmuls, four devices would each compute the same norms and dropout. With
# sequence parallelism each computes them for a quarter of the tokens. An all-reduce becomes a
# reduce-scatter and an all-gather, which move the same bytes. Backward gathers once more; in
# return, a device saves less for it.

# %%
import dataclasses

sharded = dataclasses.replace(config, layout=Layout(dp=2, tp=4, sequence_parallel=True))
for each, moved in ((config, found), (sharded, jaxptd.comms(sharded, compiled=False))):
    sent = sum(row.wire_bytes(moved.sizes) for row in moved.jaxpr if row.axes == ("tp",))
    kept = jaxptd.memory(each, compiled=False).as_dict()["rows"]
    layer = next(row for row in kept if row["part"].startswith("a layer"))
    print(f"{each.layout!s:32} sends {sent:,} bytes over tp; a layer saves {layer['formula']:,}")

# %% [markdown]
# ## Is it right?
#
# This check is the point of the library. It compares every gradient and every updated parameter
# on the layout with those on one device, in float64.

# %%
report = jaxptd.verify(sharded)
report

# %% [markdown]
# Next: [a sequence that no device holds whole](3_ring_attention.py).
