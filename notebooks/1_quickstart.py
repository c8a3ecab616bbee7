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
# # 1. Train, look, sample
#
# At the end you will know how to train a small GPT on several devices, look at its loss, let it
# write, and take the same run to another layout. About 30 seconds on two cores.

# %% The accelerators of this machine, or eight simulated devices where it has none.
import shutil

import jaxptd
from jaxptd import Layout, plot

jaxptd.use_devices(8)

# %% [markdown]
# A *config* says everything about a run: the model, the *layout* of its devices, data, optimizer.
# Here two replicas (`dp=2`), and each matrix is shared by two devices (`tp=2`). The text is the
# source code of jaxptd itself, byte by byte, so nothing is downloaded. Change a number and run this
# cell and those below again: the old run directory is removed, because another config is another
# run.

# %%
shutil.rmtree("runs/notebook-1", ignore_errors=True)
config = jaxptd.Config(
    model=jaxptd.ModelConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=64),
    layout=Layout(dp=2, tp=2, sequence_parallel=True),
    data=jaxptd.DataConfig(source=(f"{jaxptd.__path__[0]}/*.py",)),
    optimizer=jaxptd.OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
    train=jaxptd.TrainConfig(steps=150, global_batch_size=16, run_dir="runs/notebook-1"),
)
config

# %% [markdown]
# `train` shows its progress. It writes a run directory, so an interrupt loses nothing: run this
# cell again, and it goes on where it ended.

# %%
run = jaxptd.train(config)
run

# %% Training loss, and that of a part of the text which is kept apart.
plot.loss(run)

# %% [markdown]
# The model has seen a few hundred kilobytes; it knows what Python looks like, not what it means.

# %%
print(run.sample("def ", tokens=120, seed=1))

# %% [markdown]
# ## Another layout, the same run
#
# A checkpoint knows nothing of devices. So the run can be loaded on any layout, here four devices
# that share each sequence (`cp=4`). Its loss is the same number, but for the last digits of
# float32.

# %%
other = jaxptd.load("runs/notebook-1", Layout(cp=4))
print(run.evaluate())
print(other.evaluate())

# %% [markdown]
# That is no luck: a layout computes what one device computes. `verify` runs two training steps of
# this model in float64 on the layout and on one device, and compares every gradient.

# %%
jaxptd.verify(config)

# %% [markdown]
# Next: [what the devices of a layout hold and what moves between them](2_tensor_parallelism.py).
