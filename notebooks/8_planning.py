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
# # 8. Planning a run
#
# By the end you will know how to find the fastest layouts of a model on GPUs that you don't have
# yet, what bounds them, and how far to trust the predictions.

# %%
import sys  # noqa: F401, for the command below

import jaxptd
from jaxptd import plot

jaxptd.use_devices(8)

# %% [markdown]
# ## From a question to a config
#
# Which layout trains Llama 3 with 70 billion parameters fastest on 64 H200s? The planner knows
# the model's FLOPs, the bytes that each layout moves and holds (from the formulas that the other
# notebooks checked), and a table of the hardware. It does not run anything.

# %%
config = jaxptd.load_config("llama3-70b", ["--data.source=none"])
plan = jaxptd.plan(config, gpus=64, gpu="h200")
plan

# %% Time and memory of the best layouts, and what bounds the fastest.
plot.plan(plan)

# %% The best layout is a config. These options turn the config above into it.
best = plan.best[0]
print(best.config.layout)
print(" ".join(plan.options(best)))

# %% [markdown]
# ## What if?
#
# Any field can be fixed. How much would two-way tensor parallelism cost, or a pipeline of four
# stages?

# %%
for pins in ({"layout.tp": 2}, {"layout.pp": 4}, {"layout.zero": 3}):
    found = jaxptd.plan(config, gpus=64, gpu="h200", pins=pins)
    print(f"{pins!s:20} {found.tokens_per_second(found.best[0]):12,.0f} tokens/s")
print(f"{'free':20} {plan.tokens_per_second(best):12,.0f} tokens/s")
print(f"{plan.days(best, 1e12):.0f} days for 1e12 tokens")

# %% If nothing fits, the message says what would help.
try:
    jaxptd.plan(config, gpus=4, gpu="a100-40")
except jaxptd.UserError as error:
    print(error)

# %% [markdown]
# ## Can it be trusted?
#
# The same cost model predicts published training steps: each row of Megatron's table 1 from a fit
# to the others. The band after each MFU is the resulting error. The page *Planning* of the
# documentation lists what the model cannot know, such as congestion, clocks and a slow host.

# %%
# !{sys.executable} -m jaxptd plan validate --held-out

# %% [markdown]
# Try a planned layout here before you pay for it: with a small model on simulated devices, the
# same kind of layout gives the same results as one device.

# %%
small = jaxptd.Config(
    jaxptd.ModelConfig(family="llama", num_layers=4, hidden_size=32, num_heads=4, seq_length=32),
    jaxptd.Layout(pp=2, tp=4, sequence_parallel=True, collective_matmul=True, zero=1),
    train=jaxptd.TrainConfig(global_batch_size=4, micro_batches=2),
)
jaxptd.verify(small)

# %% [markdown]
# Next: [experts that a router chooses](9_experts.py).
