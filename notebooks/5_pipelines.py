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
# # 5. Pipelines
#
# By the end you will know how to read a schedule, find its bubble, write a schedule of your own,
# and run it.

# %%
import shutil
from pathlib import Path

import jaxptd
from jaxptd import Layout, plot

jaxptd.use_devices(8)

# %% [markdown]
# ## A schedule is a table
#
# Each stage has a part of the layers. F1 is the forward pass of micro-batch 1, B1 its backward. A
# row is a stage, a column a tick. A stage idles in empty cells; together they are the *bubble*. The
# gaps between the first forwards of a stage cost no time: every other tick is reserved for
# backwards, and the first gradient arrives at the same tick whatever the stage does before.

# %%
plot.schedule(jaxptd.make_schedule("1f1b", stages=4, micro_batches=8))

# %% [markdown]
# Backward has two halves: the gradient of the input (B), which the previous stage waits for, and
# the gradient of the weights (W), which nothing waits for. Zero-bubble schedules put W where a
# stage would idle.

# %%
plot.schedule(jaxptd.make_schedule("zb-h1", stages=4, micro_batches=8))

# %% The share of idle cells of each schedule.
for name in jaxptd.SCHEDULES:
    schedule = jaxptd.make_schedule(name, stages=4, micro_batches=8)
    idle = (schedule.table[..., 0] == 0).mean()
    print(f"{name:12} {schedule.ticks:3} ticks, {idle:.0%} of the cells idle")

# %% [markdown]
# ## A schedule of your own
#
# Your own schedule is a CSV file with a line per stage and a cell per tick. This one runs the
# forwards of two micro-batches, then their backwards.

# %%
own = "F0,F1,,,,B0,B1\n,F0,F1,B0,B1,,\n"
Path("own.csv").write_text(own)
layout = Layout(pp=2, schedule="own.csv")
plot.schedule(jaxptd.make_schedule("own.csv", stages=2, micro_batches=2))

# %% A table that cannot work is refused, and the message says why.
Path("wrong.csv").write_text(own.replace(",F0,F1,B0", "F0,F1,,B0"))
try:
    jaxptd.make_schedule("wrong.csv", stages=2, micro_batches=2)
except jaxptd.UserError as error:
    print(error)

# %% [markdown]
# ## Running it
#
# One executor runs every table, so only one program has to be correct. It computes the same step
# as one device. A different config needs a new run, so the cell first removes the old run
# directory.

# %%
shutil.rmtree("runs/notebook-5", ignore_errors=True)
config = jaxptd.Config(
    jaxptd.ModelConfig(num_layers=5, hidden_size=32, num_heads=4, seq_length=32),
    layout,
    jaxptd.DataConfig(source=(f"{jaxptd.__path__[0]}/*.py",)),
    jaxptd.OptimizerConfig(learning_rate=3e-3, warmup_steps=5),
    jaxptd.TrainConfig(
        steps=20, global_batch_size=8, micro_batches=2, run_dir="runs/notebook-5", sample_tokens=0
    ),
)
run = jaxptd.train(config)
plot.loss(run)

# %% The same run loads under another schedule, since checkpoints are independent of stages.
print(run.evaluate(), jaxptd.load("runs/notebook-5", Layout(pp=4, schedule="1f1b")).evaluate())

# %%
jaxptd.verify(config)

# %% [markdown]
# Next: [where the memory is](6_memory.py).
