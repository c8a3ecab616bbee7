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
# # 6. Where the memory is
#
# At the end you will know what a device holds in a training step, and what ZeRO, recomputation
# and offloading change about it.

# %%
import dataclasses

import jaxptd
from jaxptd import Layout, plot

jaxptd.use_devices(8)

# %% [markdown]
# ## Four parts
#
# Parameters, their gradients, the optimizer's moments, and what each layer keeps for backward.
# The first three depend on the model only, the last one on batch and sequence too. The report has
# them by formula, as counted in the program, and as XLA has compiled it.

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
# Eight replicas hold everything eight times. ZeRO gives each an eighth: of parameters and moments
# between steps (stage 1), of gradients too (2), and of the parameters during the step (3), where
# a layer is gathered when it runs. Its messages are as large as those of plain data parallelism,
# but for stage 3.


# %%
def sizes(config):
    """Bytes of a device: state, and all that is temporary, as compiled."""
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
# A layer may keep less and compute it again in backward. `dots` keeps results of products, `full`
# the layer's input only.

# %%
for remat in ("none", "dots", "attention", "full"):
    each = dataclasses.replace(config, model=dataclasses.replace(model, remat=remat))
    rows = jaxptd.memory(each, compiled=False).as_dict()["rows"]
    layer = next(row["formula"] for row in rows if row["part"].startswith("a layer"))
    print(f"remat {remat:9} a layer keeps {layer:9,} bytes")

# %% [markdown]
# ## In host memory
#
# `layout.offload` keeps moments and masters in the memory of the host, or what layers keep for
# backward. On simulated devices the host's memory is the same memory, so only a GPU shows the
# gain; that the numbers stay the same can be proved anywhere.

# %%
jaxptd.verify(dataclasses.replace(config, layout=Layout(dp=2, zero=1, offload="optimizer")))

# %% [markdown]
# Next: [a model of others](7_hugging_face.py).
