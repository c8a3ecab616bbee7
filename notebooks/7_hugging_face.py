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
# By the end you will know how to load the weights and the tokenizer of a Hugging Face model on a
# layout, check that the layout computes what one device computes, fine-tune the model, measure on
# held-out text that it improved, and write it back. The notebook needs the `hf` extra.

# %%
import shutil
import sys  # noqa: F401, for the commands below
from pathlib import Path

import jaxptd
from jaxptd import Layout, plot

jaxptd.use_devices(8)

# %% [markdown]
# ## A model
#
# To avoid a download, an example script makes a tiny Llama: random weights, and a tokenizer of
# 1,024 tokens that it trains on Python's standard library. With a model of your own, skip this
# cell and give its directory instead of `models/notebook-7-tiny`.
#
# Cells remove what they wrote before, so you can change any of them and run it and those below
# again.

# %%
shutil.rmtree("models/notebook-7-tiny", ignore_errors=True)
examples = Path(jaxptd.__path__[0]).parent / "examples"
# !{sys.executable} "{examples}/tiny_model.py" models/notebook-7-tiny
# !{sys.executable} -m jaxptd convert --check models/notebook-7-tiny | tail -n 7

# %% [markdown]
# ## Held-out text
#
# The model will be fine-tuned on the files in jaxptd's folders. One file outside them is held out
# for measuring, in 16 sequences of 128 tokens.

# %%
tokenizer = jaxptd.load_tokenizer("models/notebook-7-tiny")
ids = tokenizer.encode(Path(jaxptd.__path__[0], "collectives.py").read_text(encoding="utf-8"))
rows = ids[: 16 * 129].reshape(16, 129)
held_out = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
print([tokenizer.decode([token]) for token in rows[0, :12]])

# %% [markdown]
# ## On any layout
#
# Each device reads its own slices from the file. Any layout on which the model fits works: here
# two devices share the sequence, and two share every matrix. A 70 B model is read in the same way,
# and no host ever holds more than its part.

# %%
layout = Layout(cp=2, tp=2, sequence_parallel=True)
base = jaxptd.from_hf("models/notebook-7-tiny", layout=layout, seq_length=128)
base

# %% Loss and gradients on the held-out text are the same on one device and on four.
one = jaxptd.from_hf("models/notebook-7-tiny", seq_length=128)
for run in (one, base):
    before, gradients = run.loss_and_gradients(held_out)
    print(f"{run.config.layout!s:35} loss {before:.6f}")

# %% The gradients under Hugging Face's names.
theirs = jaxptd.hf.names(base.program, gradients)
for name in list(theirs)[:4]:
    print(name, theirs[name].shape)

# %% [markdown]
# ## Fine-tuning
#
# `checkpoint.start` names the weights of step 0, `data.tokenizer` the tokenizer. The rest is a
# run like any other. The learning rate is high because the weights are random; for a real model
# use a tenth to a hundredth of it.

# %%
shutil.rmtree("runs/notebook-7", ignore_errors=True)
config = jaxptd.Config(
    base.config.model,
    Layout(dp=2, tp=2),
    jaxptd.DataConfig(
        source=(f"{jaxptd.__path__[0]}/*/[a-z]*.py",), tokenizer="models/notebook-7-tiny"
    ),
    jaxptd.OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
    jaxptd.TrainConfig(steps=100, global_batch_size=8, run_dir="runs/notebook-7", sample_tokens=0),
    jaxptd.CheckpointConfig(start="models/notebook-7-tiny"),
)
tuned = jaxptd.train(config)
plot.loss(tuned)

# %% Has the model improved on text that it has not seen?
after = tuned.loss_and_gradients(held_out).loss
print(f"loss on the held-out text: {before:.3f} before, {after:.3f} after fine-tuning")
print("better" if after < before else "not better", f"by {abs(before - after):.3f} nats per token")

# %%
jaxptd.verify(config)

# %% [markdown]
# ## And back
#
# The directory contains the weights, the configs and the tokenizer. Transformers can read it, and
# so can everything that reads the same files. Loaded again, it gives the same loss.

# %%
shutil.rmtree("models/notebook-7-tuned", ignore_errors=True)
# !{sys.executable} -m jaxptd convert --to-hf runs/notebook-7 --out models/notebook-7-tuned
again = jaxptd.from_hf("models/notebook-7-tuned").loss_and_gradients(held_out).loss
print(f"{after:.6f} in the run, {again:.6f} read back")

# %% [markdown]
# `docs/howto/fine_tune.md` fine-tunes a chat model on prompts and answers, with commands instead
# of Python.
#
# Next: [planning a run](8_planning.py).
