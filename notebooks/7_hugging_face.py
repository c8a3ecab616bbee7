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
# # 7. A Hugging Face model on a layout
#
# At the end you will know how to load the weights of a Hugging Face model on any layout, prove
# that the layout computes what one device computes, fine-tune it, and write it back. Needs the
# `hf` extra.
#
# So that nothing is downloaded, a tiny Llama with random weights is made first. With a model of
# your own, skip that cell and give its directory instead.

# %%
import sys  # noqa: F401, for the commands below

import numpy as np

import jaxptd
from jaxptd import Layout, plot

jaxptd.use_devices(8)

# %% A run of one step, written as Hugging Face has it: config.json and model.safetensors.
text = jaxptd.DataConfig(source=(f"{jaxptd.__path__[0]}/*.py",))
tiny = jaxptd.Config(
    jaxptd.ModelConfig(
        family="llama", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, seq_length=64
    ),
    data=text,
    train=jaxptd.TrainConfig(steps=1, run_dir="runs/notebook-7-base", sample_tokens=0),
)
jaxptd.train(tiny)
# !{sys.executable} -m jaxptd convert --to-hf runs/notebook-7-base --out models/tiny-llama

# %% [markdown]
# ## On any layout
#
# Each device reads its own slices from the file. A layout may be anything that the model fits on:
# here the sequence is shared by two devices, and every matrix by two. A model of 70 B is read in
# the same way, and no host ever has more than its part.

# %%
base = jaxptd.from_hf("models/tiny-llama", layout=Layout(cp=2, tp=2, sequence_parallel=True))
base

# %% Loss and gradients of a batch, the same on one device and on four.
one = jaxptd.from_hf("models/tiny-llama")
tokens = np.random.default_rng(0).integers(0, 256, (4, 65), np.int32)
batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
for run in (one, base):
    loss, gradients = run.loss_and_gradients(batch)
    print(f"{run.config.layout!s:32} loss {loss:.6f}")

# %% The gradients have Hugging Face's names, if you like.
theirs = jaxptd.hf.names(base.program, gradients)
for name in list(theirs)[:4]:
    print(name, theirs[name].shape)

# %% [markdown]
# ## Fine-tuning
#
# `checkpoint.start` names the weights of step 0; the rest is a run like any other.

# %%
tuned = jaxptd.Config(
    base.config.model,
    Layout(dp=2, tp=2),
    text,
    jaxptd.OptimizerConfig(learning_rate=3e-3, warmup_steps=5),
    jaxptd.TrainConfig(steps=60, global_batch_size=16, run_dir="runs/notebook-7", sample_tokens=0),
    jaxptd.CheckpointConfig(start="models/tiny-llama"),
)
run = jaxptd.train(tuned)
plot.loss(run)

# %%
jaxptd.verify(tuned)

# %% [markdown]
# ## And back
#
# The directory that is written can be read by transformers, and by everything that reads its
# files.

# %%
# !{sys.executable} -m jaxptd convert --to-hf runs/notebook-7 --out models/tuned
jaxptd.from_hf("models/tuned").loss_and_gradients(batch).loss

# %% [markdown]
# Next: [planning a run](8_planning.py).
