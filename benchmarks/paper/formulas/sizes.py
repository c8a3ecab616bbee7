"""Table 3 of Zhu and Dong: sizes of its models, and the parameters that they have here.

`python -m benchmarks.paper --table 3`.
"""

from benchmarks.paper import published
from benchmarks.paper.models import parameters
from jaxptd.analysis.report import table
from jaxptd.commands.command_line import load_config

CONFIGS = {0.54: "gpt2-0.54b", 1.20: "gpt2-1.2b", 2.50: "gpt2-2.5b", 4.20: "gpt2-4.2b"}
HEAD = ("published, billion", "layers", "hidden", "heads", "GPUs", "counted here, billion")
HEAD += ("12 L H^2", "config")
WORDS = """\
*Published*: sizes of table 3. *Counted*: parameters of this library's GPT-2 of these sizes, with a
vocabulary of 50,304, 512 positions and a tied output. `12 L H^2` is the matrices of the layers
alone: of the first two models they are already more than the published number, so no GPT-2 of these
sizes has it."""


def rows() -> list[list[str]]:
    """A row for each model."""
    found = []
    for size, config in CONFIGS.items():
        sizes = published.sizes(size)
        model = load_config(config).model
        ours = model.num_layers, model.hidden_size, model.num_heads
        assert ours == (sizes.layers, sizes.hidden, sizes.heads), f"configs/{config}.yaml: {ours}"
        matrices = 12 * sizes.layers * sizes.hidden**2
        counted = parameters(config) / 1e9
        row = [f"{size:.2f}", *(str(n) for n in sizes), f"{counted:.2f}", f"{matrices / 1e9:.2f}"]
        found.append([*row, f"`{config}`"])
    return found


def page() -> str:
    """The page of results, in Markdown."""
    return "\n\n".join([WORDS, table([HEAD, *rows()])]) + "\n"
