"""A notebook session as a script: train, look, load on another layout, sample, prove, count.

`python examples/notebook_session.py` takes about ten seconds on two cores and writes into
`session/`. The cells begin with `# %%`, so editors and jupytext open it as a notebook.
"""

# %% Eight simulated devices. On a machine with GPUs leave this out.
import jaxptd
from jaxptd import Layout, plot

jaxptd.simulate(8)

# %% A config: a packaged one, with some fields set. `Config(...)` makes one from its sections.
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

# %% Train. The callback is given each row of the log; an interrupt would leave a usable run.
rows = []
run = jaxptd.train(config, on_log=rows.append)
print(run)
print(run.state)

# %% Metrics are columns, so pandas.DataFrame(run.metrics) works.
loss = run.metrics["loss"]
print(f"loss {loss[0]:.2f} -> {loss[-1]:.2f}")

# %% Pictures are matplotlib figures. A notebook shows them; here they are saved.
pictures = {
    "loss": plot.loss(run),
    "mesh": plot.mesh(config.layout),
    "schedule": plot.schedule(jaxptd.make_schedule("zb-h1", stages=4, micro_batches=8)),
}

# %% The same run on another layout: same state, same loss.
other = jaxptd.load("session/run", Layout(dp=2))
print(run.evaluate(), other.evaluate(), sep="\n")
print(other.sample("def ", tokens=20))

# %% The layout computes what one device computes.
report = jaxptd.verify(config)
print(report)

# %% What a step moves between devices, and what each of them holds.
moved, held = jaxptd.comms(config), jaxptd.memory(config)
print(moved, held, sep="\n")
pictures |= {"moved": plot.bytes_by_axis(moved), "held": plot.memory(held)}
for name, figure in pictures.items():
    plot.save(figure, f"session/{name}.svg")
