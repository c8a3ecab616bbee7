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
# # 10. From a base model to a chat model
#
# By the end you will know how to tune a model on chats, train it further with adapters on pairs of
# better and worse answers, talk to it, and write the result back in the Hub's files. The notebook
# needs the `hf` extra.

# %%
import dataclasses
import importlib
import inspect
import json
import shutil
import sys  # noqa: F401, for the commands below
from pathlib import Path

import jaxptd
from jaxptd import Layout, plot

jaxptd.use_devices(8)

# %% [markdown]
# ## A base model and its data
#
# The base is a tiny Llama with random weights, which an example script makes, with a tokenizer and
# a chat template. For a model of the Hub, give its directory instead of `models/notebook-10-tiny`.

# %%
shutil.rmtree("models/notebook-10-tiny", ignore_errors=True)
examples = Path(jaxptd.__path__[0]).parent / "examples"
# !{sys.executable} "{examples}/tiny_model.py" models/notebook-10-tiny

# %% [markdown]
# The model learns what functions of the standard library do: each chat asks for one, and the
# answer is the first line of its docstring.

# %%
modules = "os shutil json re random statistics string math itertools functools inspect ast".split()
answers = {}
for module in map(importlib.import_module, modules):
    for name, thing in inspect.getmembers(module, callable):
        if text := inspect.getdoc(thing):
            answers[f"What does {module.__name__}.{name} do?"] = text.splitlines()[0][:90]


def chat(question, *answer):
    """A chat of two messages, or of one if there is no answer."""
    said = [{"role": "assistant", "content": text} for text in answer]
    return [{"role": "user", "content": question}, *said]


chats = [{"messages": chat(*each)} for each in answers.items()]
Path("notebook-10-chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
chats[0]

# %% [markdown]
# ## Tune it on chats
#
# `messages_field` names the field of chats. The model's own template writes them as text, and only
# the assistant's words count in the loss. `documents="whole"` packs whole chats into sequences, and
# none sees another. The learning rate is high because the weights are random.

# %%
shutil.rmtree("runs/notebook-10-chat", ignore_errors=True)
base = jaxptd.from_hf("models/notebook-10-tiny", seq_length=128).config.model
config = jaxptd.Config(
    base,
    Layout(dp=2, tp=2, zero=1),
    jaxptd.DataConfig(
        source="notebook-10-chats.jsonl",
        tokenizer="models/notebook-10-tiny",
        messages_field="messages",
        documents="whole",
        too_long="drop",
    ),
    jaxptd.OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
    jaxptd.TrainConfig(
        steps=120, global_batch_size=16, run_dir="runs/notebook-10-chat", sample_tokens=0
    ),
    jaxptd.CheckpointConfig(start="models/notebook-10-tiny"),
)
tuned = jaxptd.train(config)
plot.loss(tuned)

# %% Ask it. It has seen little, and is very small, but it answers in the right form.
question = "What does os.getcwd do?"
print(tuned.chat(chat(question), tokens=40, temperature=0))

# %% [markdown]
# ## Prefer some answers
#
# Now pairs: to the same question a better and a worse answer. Here people like short answers:
# each pair has the answers to two questions, and the shorter one is better. (Real pairs come from
# people, or from a model that judges.) The loss is DPO's: what the better answer gains, in
# log-probability, should exceed what the worse one gains.

# %%
texts = list(answers.values())
pairs = []
for (asked, text), other in zip(answers.items(), [*texts[1:], texts[0]], strict=True):
    if len(text) != len(other):
        short, long = sorted((text, other), key=len)
        pairs.append({"chosen": chat(asked, short), "rejected": chat(asked, long)})
Path("notebook-10-pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
pairs[0]

# %% [markdown]
# Adapters train in place of the weights: beside each matrix two thin ones, of rank 8. Before the
# first step the run computes the log-probability of each answer once, with the weights that it
# begins with. So no second model is held.

# %%
shutil.rmtree("models/notebook-10-chat", ignore_errors=True)
# !{sys.executable} -m jaxptd convert --to-hf runs/notebook-10-chat --out models/notebook-10-chat

# %%
shutil.rmtree("runs/notebook-10-short", ignore_errors=True)
model = jaxptd.from_hf("models/notebook-10-chat", seq_length=256, lora={"rank": 8}).config.model
preferring = jaxptd.Config(
    dataclasses.replace(model, preference={"loss": "sigmoid"}),
    Layout(dp=2, tp=2, zero=1),
    jaxptd.DataConfig(
        source="notebook-10-pairs.jsonl",
        tokenizer="models/notebook-10-chat",
        messages_field="chosen",
        rejected_field="rejected",
        documents="whole",
        too_long="drop",
        validation_fraction=0.2,
    ),
    jaxptd.OptimizerConfig(learning_rate=1e-3, warmup_steps=5, weight_decay=0.0),
    jaxptd.TrainConfig(
        steps=40,
        global_batch_size=8,
        eval_every=20,
        run_dir="runs/notebook-10-short",
        sample_tokens=0,
    ),
    jaxptd.CheckpointConfig(start="models/notebook-10-chat"),
)
preferred = jaxptd.train(preferring)

# %% How many of the pairs that it has not seen does it get right?
found = preferred.evaluate()
print(
    f"{found['validation_accuracy']:.0%} of the held-out pairs: the better answer has gained more"
)
print(preferred.chat(chat(question), tokens=40, temperature=0))

# %% The layout computes what one device computes, with adapters and pairs as well.
jaxptd.verify(preferring)

# %% [markdown]
# ## And back
#
# Exported as a model, with the adapters merged into the weights, or the adapters alone, as PEFT
# reads them.

# %%
shutil.rmtree("models/notebook-10-short", ignore_errors=True)
shutil.rmtree("models/notebook-10-adapter", ignore_errors=True)
# !{sys.executable} -m jaxptd convert --to-hf runs/notebook-10-short --out models/notebook-10-short
# !{sys.executable} -m jaxptd convert --to-hf runs/notebook-10-short --out models/notebook-10-adapter --unmerged

# %% [markdown]
# `docs/howto/fine_tune.md` does the same with commands, and says which learning rates are usual.
