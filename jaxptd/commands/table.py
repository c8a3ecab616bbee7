"""The commands of `jaxptd`, and the modules that are imported only when they are needed.

No other module imports one by a name: the order of imports could not be checked there.
"""

import dataclasses
import importlib
from typing import Any

from jaxptd.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Command:
    """One command: `jaxptd NAME`, or `python -m jaxptd.NAME`.

    Args:
        name: of the command.
        module: has `main(argv)`, which runs the command, and `parser()`, which reads its options.
        summary: a line for the list of commands.
    """

    name: str
    module: str
    summary: str

    def load(self) -> Any:
        """Imports the module of this command, and of no other."""
        return importlib.import_module(self.module)


# They import JAX, or what only some options of a command need.
LATER = {
    "plan calibrate": "jaxptd.commands.calibrate",
    "plan validate": "jaxptd.commands.validate",
    "compiler": "jaxptd.compiling",
    "models of Hugging Face": "jaxptd.hf.load",
}
COMMANDS = (
    Command("train", "jaxptd.train", "train a model on a mesh of devices, or resume a run"),
    Command("generate", "jaxptd.generate", "continue a text with the model of a run"),
    Command("data", "jaxptd.commands.data", "tokenize text once, into a file that runs map"),
    Command("convert", "jaxptd.hf.convert", "convert weights from and to Hugging Face directories"),
    Command("verify", "jaxptd.verify", "prove that a layout computes what one device computes"),
    Command("comms", "jaxptd.comms", "count what a training step moves between devices"),
    Command("memory", "jaxptd.memory", "predict what a device holds in a training step"),
    Command("plan", "jaxptd.plan", "predict times of training steps, and their errors"),
    Command("profile", "jaxptd.profile", "measure where the time of a training step goes"),
    Command("mesh", "jaxptd.commands.mesh", "draw the mesh of a layout and list its rank groups"),
    Command("pipeline", "jaxptd.commands.pipeline", "draw and compare pipeline schedules"),
    Command("completion", "jaxptd.commands.completion", "complete commands and options in a shell"),
)


def find_command(name: str) -> Command:
    """The command of a name.

    Raises:
        UserError: there is none; the line has the name that is most like it.
    """
    names = {command.name: command for command in COMMANDS}
    if name in names:
        return names[name]
    remedy = did_you_mean(name, names, otherwise=f"use one of {', '.join(names)}")
    raise UserError(f"unknown command {name[:80]!r}; {remedy}")


def later(name: str) -> Any:
    """Imports one of the modules in `LATER`."""
    return importlib.import_module(LATER[name])
