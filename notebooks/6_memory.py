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
# # 6. Where the memory goes
#
# By the end you will know what a device holds in a training step, and what ZeRO, recomputation
# and offloading change.

# %%
import dataclasses

import jaxptd
from jaxptd import Layout, plot

jaxptd.use_devices(8)

# %% [markdown]
# ## Four parts
#
# A device holds parameters, their gradients, the optimizer's moments, and what each layer saves
# for backward. The first three depend only on the model, the last also on batch and sequence.
# The report shows them by formula, as counted in the program, and as compiled by XLA.

# %%
model = jaxptd.ModelConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=64, vocab_size=256)
config = jaxptd.Config(model, Layout(dp=8), train=jaxptd.TrainConfig(global_batch_size=16))
found = jaxptd.memory(config)
found

# %%
plot.memory(found)

# %% [markdown]
# ## ZeRO
#
# Eight replicas hold everything eight times. With ZeRO each holds an eighth: of parameters and
# moments between steps (stage 1), of gradients as well (stage 2), and of parameters during the step
# (stage 3), which then gathers each layer when it runs. Only stage 3 sends more bytes than plain
# data parallelism.


# %%
def sizes(config):
    """Bytes of a device as compiled: the state, and everything temporary."""
    rows = {row["part"]: row["compiled"] for row in jaxptd.memory(config).as_dict()["rows"]}
    held = rows["all that enters the step"]
    return held, next(size for part, size in rows.items() if part.startswith("temporary"))


for stage in (0, 1, 2, 3):
    each = dataclasses.replace(config, layout=Layout(dp=8, zero=stage))
    (held, temporary), moved = sizes(each), jaxptd.comms(each, compiled=False)
    sent = sum(row.wire_bytes(moved.sizes) for row in moved.jaxpr)
    print(f"zero={stage}: {held:9,} bytes held, {temporary:9,} more in a step, {sent:9,} sent")

# %% [markdown]
# ## Recomputation
#
# A layer can save less and recompute the rest in backward. `dots` saves the results of matmuls,
# `full` only the layer's input.

# %%
for remat in ("none", "dots", "attention", "full"):
    each = dataclasses.replace(config, model=dataclasses.replace(model, remat=remat))
    rows = jaxptd.memory(each, compiled=False).as_dict()["rows"]
    layer = next(row["formula"] for row in rows if row["part"].startswith("a layer"))
    print(f"remat {remat:9} a layer saves {layer:9,} bytes")

# %% [markdown]
# ## In host memory
#
# `layout.offload` moves masters and moments, or what layers save for backward, to the host's
# memory. Simulated devices share that memory, so only a GPU shows the gain. But you can check
# anywhere that the results stay the same.

# %%
jaxptd.verify(dataclasses.replace(config, layout=Layout(dp=2, zero=1, offload="optimizer")))

# %% [markdown]
# Next: [a Hugging Face model](7_hugging_face.py).
