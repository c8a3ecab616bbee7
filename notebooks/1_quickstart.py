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
# By the end you will know how to train a small GPT on several devices, look at its loss, let it
# write, and move the same run to another layout. The notebook takes about 30 seconds on two
# cores.

# %% Uses the accelerators of this machine, or simulates eight devices if it has none.
import shutil

import jaxptd
from jaxptd import Layout, plot

jaxptd.use_devices(8)

# %% [markdown]
# A *config* describes a whole run: the model, the *layout* of its devices, data, optimizer. Here
# there are two replicas (`dp=2`), and two devices share each matrix (`tp=2`). The training text is
# the source code of jaxptd itself, byte by byte, so nothing is downloaded. To experiment, change a
# number and run this cell and those below again. It removes the old run directory, because a
# different config needs a new run.

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
# `train` shows its progress and writes a run directory. After an interrupt run this cell again,
# and it continues where it stopped.

# %%
run = jaxptd.train(config)
run

# %% The training loss, and the loss on held-out text.
plot.loss(run)

# %% [markdown]
# The model has seen a few hundred kilobytes. It knows what Python looks like, but not what it
# means.

# %%
print(run.sample("def ", tokens=120, seed=1))

# %% [markdown]
# ## Another layout, the same run
#
# A checkpoint does not depend on devices, so the run loads on any layout, here four devices that
# share each sequence (`cp=4`). The loss is the same, except for the last digits of float32.

# %%
other = jaxptd.load("runs/notebook-1", Layout(cp=4))
print(run.evaluate())
print(other.evaluate())

# %% [markdown]
# This is by design: a layout computes what one device computes. `verify` checks it. It runs two
# training steps of this model in float64, on the layout and on one device, and compares every
# gradient.

# %%
jaxptd.verify(config)

# %% [markdown]
# Next: [what the devices of a layout hold and what moves between them](2_tensor_parallelism.py).
