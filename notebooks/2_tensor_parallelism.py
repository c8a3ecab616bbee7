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
# At the end you will know what a mesh is, which block of each matrix a device holds under tensor
# parallelism, what moves in a step, and how to check that against the formula.

# %%
import jax

import jaxptd
from jaxptd import Layout, plot

jaxptd.use_devices(8)

# %% [markdown]
# ## A mesh
#
# The devices form a grid with a name for each axis. A layout gives the sizes: here two replicas
# of the model, each on four devices. Devices that are neighbours along `tp`, which talk most, are
# neighbours in the machine.

# %%
layout = Layout(dp=2, tp=4)
plot.mesh(layout)

# %% Which devices sum gradients together (dp), and which share a matrix (tp).
for name, groups in jaxptd.rank_groups(layout).items():
    print(f"{name:12} {groups}")

# %% [markdown]
# ## What a device holds
#
# Megatron's tensor parallelism cuts the first matrix of a pair by columns and the second by rows,
# so that nothing has to move between the two products. The spec beside each parameter says so:
# `tp` stands at the dim that is cut.

# %%
model = jaxptd.ModelConfig(num_layers=2, hidden_size=32, num_heads=4, seq_length=32, vocab_size=128)
config = jaxptd.Config(model, layout, train=jaxptd.TrainConfig(global_batch_size=8))
program = jaxptd.Program(config, jaxptd.make_mesh(layout))
state = program.init_state()

for name, array in state["params"].items():
    block = array.addressable_shards[0].data.shape
    print(f"{name:28} {array.shape!s:18} a device: {block!s:18} {array.sharding.spec}")

# %% The same as a picture: device i holds the part of the MLP's matrices with its number.
for name in ("blocks.mlp.up.w", "blocks.mlp.down.w"):
    print(name)
    jax.debug.visualize_array_sharding(state["params"][name][0])

# %% [markdown]
# ## What moves
#
# `comms` traces the training step and counts its collectives. Here each layer sums `x[B, T, D]`
# over tp twice forward and twice backward, and once a step every gradient is summed over dp. The
# program moves what the formula says, to the byte.

# %%
found = jaxptd.comms(config)
found

# %%
plot.bytes_by_axis(found)

# %% [markdown]
# ## Sequence parallelism
#
# Between the products, norms and dropout would be done four times. With sequence parallelism each
# device does them for a quarter of the tokens; a sum becomes a reduce-scatter and a gather, which
# move the same bytes. What a device keeps for backward shrinks.

# %%
import dataclasses

sharded = dataclasses.replace(config, layout=Layout(dp=2, tp=4, sequence_parallel=True))
for each, moved in ((config, found), (sharded, jaxptd.comms(sharded, compiled=False))):
    sent = sum(row.wire_bytes(moved.sizes) for row in moved.jaxpr if row.axes == ("tp",))
    kept = jaxptd.memory(each, compiled=False).as_dict()["rows"]
    layer = next(row for row in kept if row["part"].startswith("a layer"))
    print(f"{each.layout!s:32} sends {sent:,} bytes over tp; a layer keeps {layer['formula']:,}")

# %% [markdown]
# ## Is it right?
#
# The check that this library is about: every gradient and every updated parameter, on the layout
# and on one device, in float64.

# %%
report = jaxptd.verify(sharded)
report

# %% [markdown]
# Next: [a sequence that no device holds whole](3_ring_attention.py).
