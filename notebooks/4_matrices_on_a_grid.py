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
# # 4. Matrices on a grid
#
# By the end you will know how Fox's, Cannon's and the SUMMA algorithm multiply matrices that are
# stored in blocks on a grid of devices, what each of them moves, and how a transformer trains on
# such a grid.

# %%
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML
from matplotlib.animation import FuncAnimation

import jaxptd
from jaxptd import Layout, plot
from jaxptd.summa2d import Grid, multiply

jaxptd.use_devices(8)

# %% [markdown]
# ## The blocks
#
# Device (i, j) holds block (i, j) of A, of B and of C = A B. It needs the sum over k of A[i, k]
# B[k, j], so in every step it needs one block of A's row i and the matching block of B's column
# j. The algorithms differ in the k of step t, and in how the blocks get there.

# %%
n = 3
STEPS = {
    "summa": ("A and B are broadcast", lambda i, j, t: t),
    "fox": ("A is broadcast, B goes up", lambda i, j, t: (i + t) % n),
    "cannon": ("A goes left, B goes up", lambda i, j, t: (i + j + t) % n),
}


def draw(t):
    """Draws which blocks each device multiplies at step t."""
    for axes, (name, (words, k_of)) in zip(all_axes, STEPS.items(), strict=True):
        axes.clear()
        k = np.array([[k_of(i, j, t) for j in range(n)] for i in range(n)])
        axes.imshow(k, cmap="Set3", vmin=0, vmax=11)
        for i in range(n):
            for j in range(n):
                axes.text(j, i, f"A{i}{k[i, j]}\nB{k[i, j]}{j}", ha="center", va="center")
        axes.set(xticks=[], yticks=[], title=f"{name}, step {t}\n{words}")


figure, all_axes = plt.subplots(1, 3, figsize=(9, 3.6))
animation = FuncAnimation(figure, draw, frames=n, interval=1200)
plt.close(figure)
HTML(animation.to_jshtml())

# %% [markdown]
# In each picture a color stands for a k. Under SUMMA all devices use the same k. Under Fox the
# devices of a row do. Under Cannon no two neighbours do, so a device never sends to more than one
# other.
#
# ## All of them compute the same product

# %%
mesh = jaxptd.make_mesh(Layout(row=2, col=2))
a, b = np.random.default_rng(0).standard_normal((2, 48, 48), np.float32)
for algorithm in ("summa", "fox", "cannon", "gather"):
    product = partial(multiply, mesh=mesh, grid=Grid(algorithm))
    text = str(jax.make_jaxpr(product)(a, b))
    moves = {name: text.count(f"{name}[") for name in ("ppermute", "psum", "all_gather")}
    error = float(abs(product(a, b) - a @ b).max())
    print(f"{algorithm:7} error {error:.1e}; in its program: {moves}")

# %% [markdown]
# The backward pass of A B takes two more matmuls, dC Bᵀ and Aᵀ dC. They run in blocks as well, so
# no device ever holds a whole matrix.

# %%
loss = jax.jit(lambda a, b: jnp.sum(multiply(a, b, mesh, Grid("cannon")) ** 2))
da, db = jax.grad(loss, (0, 1))(a, b)
print(float(abs(da - 2 * (a @ b) @ b.T).max()), float(abs(db - 2 * a.T @ (a @ b)).max()))

# %% [markdown]
# ## A transformer on the grid
#
# Under Megatron's tensor parallelism each device holds a share of the weights, but all of the
# residual stream. On a grid activations are in blocks as well: a device holds 1 / (row x col) of
# everything.

# %%
model = jaxptd.ModelConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=64, vocab_size=128)
train = jaxptd.TrainConfig(global_batch_size=4)
for layout in (
    Layout(tp=4),
    Layout(row=2, col=2, matmul2d="summa"),
    Layout(row=2, col=2, matmul2d="fox"),
):
    config = jaxptd.Config(model, layout, train=train)
    rows = jaxptd.memory(config, compiled=False).as_dict()["rows"]
    kept = next(row["formula"] for row in rows if row["part"].startswith("a layer"))
    moved = jaxptd.comms(config, compiled=False)
    sent = sum(x.wire_bytes(moved.sizes) for x in moved.jaxpr)
    print(f"{layout!s:34} a layer saves {kept:8,} bytes, a device sends {sent:9,}")

# %%
config = jaxptd.Config(model, Layout(row=2, col=2, matmul2d="cannon"), train=train)
plot.bytes_by_axis(jaxptd.comms(config, compiled=False))

# %%
jaxptd.verify(config)

# %% [markdown]
# The documentation's page *2D tensor parallelism* says which of them pays off, and when.
#
# Next: [pipelines](5_pipelines.py).
