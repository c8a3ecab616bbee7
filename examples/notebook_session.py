"""Runs a notebook session as a script: train, plot, change the layout, sample, verify, count.

`python examples/notebook_session.py` takes about ten seconds on two cores and writes to
`session/`. Cells begin with `# %%`, so editors and jupytext can open it as a notebook.
"""

# %% Simulates eight devices. Leave this out on a machine with GPUs.
import jaxptd
from jaxptd import Layout, plot

jaxptd.simulate(8)

# %% Loads a packaged config and overrides some fields. `Config(...)` builds one from scratch.
config = jaxptd.load_config(
    "test-tiny",
    [
        "--layout.tp=2",
        "--layout.sequence_parallel=true",
        "--data.source=" + jaxptd.__path__[0] + "/*.py",
        "--train.steps=20",
        "--train.run_dir=session/run",
        "--checkpoint.every=20",
    ],
)
print(config)
print(jaxptd.describe_mesh(config.layout))

# %% Trains. The callback receives each row of the log. If you interrupt it, the run stays usable.
rows = []
run = jaxptd.train(config, on_log=rows.append)
print(run)
print(run.state)

# %% Metrics are stored as columns, so pandas.DataFrame(run.metrics) works.
loss = run.metrics["loss"]
print(f"loss {loss[0]:.2f} -> {loss[-1]:.2f}")

# %% Plots are matplotlib figures. A notebook displays them; this script saves them below.
pictures = {
    "loss": plot.loss(run),
    "mesh": plot.mesh(config.layout),
    "schedule": plot.schedule(jaxptd.make_schedule("zb-h1", stages=4, micro_batches=8)),
}

# %% Loads the same run on another layout: the state and the loss are the same.
other = jaxptd.load("session/run", Layout(dp=2))
print(run.evaluate(), other.evaluate(), sep="\n")
print(other.sample("def ", tokens=20))

# %% Checks that the layout computes what one device computes.
report = jaxptd.verify(config)
print(report)

# %% Counts what a step moves between devices, and what each device holds.
moved, held = jaxptd.comms(config), jaxptd.memory(config)
print(moved, held, sep="\n")
pictures |= {"moved": plot.bytes_by_axis(moved), "held": plot.memory(held)}
for name, figure in pictures.items():
    plot.save(figure, f"session/{name}.svg")
