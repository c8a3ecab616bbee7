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
# At the end you will know how to read a schedule, where its bubble is and what it holds, how to
# write a schedule of your own, and how to run it.

# %%
import shutil
from pathlib import Path

import jaxptd
from jaxptd import Layout, plot

jaxptd.use_devices(8)

# %% [markdown]
# ## A schedule is a table
#
# Each stage has a part of the layers. F1 is the forward of micro-batch 1, B1 its backward. A row
# is a stage, a column a tick. Empty cells are the *bubble*.

# %%
plot.schedule(jaxptd.make_schedule("1f1b", stages=4, micro_batches=8))

# %% [markdown]
# Backward has two halves: the gradient of the input (B), for which another stage waits, and that
# of the weights (W), for which nobody does. Zero-bubble schedules put W where a stage would wait.

# %%
plot.schedule(jaxptd.make_schedule("zb-h1", stages=4, micro_batches=8))

# %% All of them, by their share of idle cells.
for name in jaxptd.SCHEDULES:
    schedule = jaxptd.make_schedule(name, stages=4, micro_batches=8)
    idle = (schedule.table[..., 0] == 0).mean()
    print(f"{name:12} {schedule.ticks:3} ticks, {idle:.0%} of the cells idle")

# %% [markdown]
# ## One of your own
#
# A schedule is a CSV file with a line for each stage: what it does at each tick. This one runs
# all forwards of two micro-batches, then their backwards.

# %%
own = "F0,F1,,,,B0,B1\n,F0,F1,B0,B1,,\n"
Path("own.csv").write_text(own)
layout = Layout(pp=2, schedule="own.csv")
plot.schedule(jaxptd.make_schedule("own.csv", stages=2, micro_batches=2))

# %% A table that cannot work is refused, in words.
Path("wrong.csv").write_text(own.replace(",F0,F1,B0", "F0,F1,,B0"))
try:
    jaxptd.make_schedule("wrong.csv", stages=2, micro_batches=2)
except jaxptd.UserError as error:
    print(error)

# %% [markdown]
# ## Running it
#
# One executor runs every table, so one program has to be right. It is the same step as on one
# device. Another config is another run, so the cell removes the old run directory first.

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

# %% The same run goes on under another schedule: checkpoints know nothing of stages.
print(run.evaluate(), jaxptd.load("runs/notebook-5", Layout(pp=4, schedule="1f1b")).evaluate())

# %%
jaxptd.verify(config)

# %% [markdown]
# Next: [where the memory is](6_memory.py).
