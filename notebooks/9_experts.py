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
# # 9. Experts
#
# By the end you will know what a router learns, where it sends tokens, and what the axis `ep`
# moves.

# %%
import shutil

import numpy as np

import jaxptd
from jaxptd import Layout, plot

jaxptd.use_devices(8)

# %% [markdown]
# ## Training a router
#
# Each layer has eight MLPs, the *experts*, and a *router*: a matrix that gives a token a score for
# each of them. The token goes through the two experts with the best scores, which also weight their
# outputs. The four devices along `ep` hold two experts each.
#
# Nothing tells the router what an expert is for. Left alone, it may send all tokens to a few
# experts, and the others learn nothing. Two things balance the loads. After each step every
# expert's bias moves: up if the expert had fewer tokens than the mean, down if it had more. The
# bias affects the choice of experts, but not the weights. And one term of the loss is smallest when
# loads are equal.

# %%
shutil.rmtree("runs/notebook-9", ignore_errors=True)
experts = {"num_experts": 8, "top_k": 2, "score": "sigmoid"}
experts |= {"bias_rate": 0.005, "balance_loss": 0.02}
config = jaxptd.Config(
    jaxptd.ModelConfig(
        family="mixtral",
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=64,
        num_heads=4,
        seq_length=32,
        moe=experts,
    ),
    Layout(ep=4),
    jaxptd.DataConfig(source=(f"{jaxptd.__path__[0]}/*.py",)),
    jaxptd.OptimizerConfig(learning_rate=5e-3, warmup_steps=5),
    jaxptd.TrainConfig(
        steps=150, global_batch_size=16, log_every=10, run_dir="runs/notebook-9", sample_tokens=0
    ),
)
run = jaxptd.train(config)

# %% [markdown]
# The picture has a row for each layer. The color shows the largest load of the layer's experts over
# their mean: 1 if all get equally many tokens, 4 if one expert gets every token. The router starts
# near the worst case.

# %%
plot.expert_load(run)

# %% [markdown]
# ## Where tokens go
#
# `choices` records the experts of each token. Below a line of held-out text are the best experts of
# its characters, in the first layer and in the second.

# %%
tokens, chosen, margins = [], [], []
for number in range(8):
    batch = run.read(run.data.validation, 16 * number)
    experts_of, margin_of = run.program.choices(run.state["params"], batch)
    tokens.append(np.asarray(batch["tokens"]))  # bytes: [B, T]
    chosen.append(experts_of)  # [B, T, L, K]
    margins.append(margin_of)  # [B, T, L]
tokens, chosen, margins = map(np.concatenate, (tokens, chosen, margins))
for sequence in range(4):
    print(repr(bytes(tokens[sequence].astype(np.uint8)).decode("latin-1")).replace("\\n", "."))
    for layer in range(2):
        best = "".join(map(str, chosen[sequence, :, layer, 0]))
        print(f" {best} layer {layer}")

# %% [markdown]
# Experts specialise in characters: all that the first layer knows about a token is its byte and
# what attention says about earlier ones. These are the characters that each expert of the first
# layer gets most often.

# %%
for expert in range(8):
    own = tokens[(chosen[:, :, 0] == expert).any(-1)]
    ids, counts = np.unique(own, return_counts=True)
    favourites = [chr(ids[i]) for i in np.argsort(-counts)[:8]]
    print(f"expert {expert}: {len(own) / tokens.size:4.0%} of the tokens, most often {favourites}")

# %% [markdown]
# The *margin* is how much better the second expert scores than the third. If it is tiny, a rounding
# error decides between them. Backward must use the experts that forward used, so a step saves each
# choice and never repeats it, whatever else `model.remat` recomputes.

# %%
print(f"smallest margin {margins.min():.1e}, median {np.median(margins):.1e}")

# %% [markdown]
# ## What ep moves
#
# Every device gathers the tokens of the four devices along `ep`, adds up what its own two experts
# make of them, and a reduce-scatter returns the sums. Backward gathers the tokens again, since a
# device saves only its own, and runs the same collectives for the gradients. The bytes do not
# depend on where the router sends tokens, so a formula predicts them before a step runs. For all
# parameters except the experts, `ep` is data parallelism: an all-reduce sums their gradients.

# %%
found = jaxptd.comms(config, compiled=False)
plot.bytes_by_axis(found)

# %% With t tokens on a device: 3 gathers of x, 2 of the choices and 2 of their weights.
t, width, top_k, layers, ep = 16 // 4 * 32, 64, 2, 2, 4
x, choices, weights = 4 * t * width, 4 * t * top_k, 4 * t * top_k
print(layers * ep * (3 * x + 2 * choices + 2 * weights), "bytes of gathers over ep")
print(layers * ep * (2 * x + weights), "bytes of reduce-scatters over ep")
for each in found.jaxpr:
    if each.axes == ("ep",):
        print(f"{each.count} x {each.kind}: {each.bytes} bytes")

# %% [markdown]
# ## The same on any layout
#
# No token is dropped, so the layout does not change the result: on another layout, the same
# parameters give the validation loss that the run ended with.

# %%
again = jaxptd.load("runs/notebook-9", Layout(ep=2, tp=2, sequence_parallel=True))
for each in (run, again):
    print(f"{each.config.layout!s:32} {each.evaluate()['validation_loss']:.6f}")

# %% [markdown]
# Next: [from a base model to a chat model](10_fine_tuning.py).
