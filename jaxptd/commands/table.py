"""The commands of `jaxptd`, and the modules that are imported only when they are needed.

Only this module imports others by name: the layers of imports could not be checked otherwise.
"""

import dataclasses
import importlib
from typing import Any

from jaxptd.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Command:
    """One command: `jaxptd NAME`, or `python -m jaxptd.NAME`.

    Args:
        name: as typed.
        module: has `main(argv)`, which runs the command, and `parser()`, which reads its options.
        summary: its line in the list of commands.
    """

    name: str
    module: str
    summary: str

    def load(self) -> Any:
        """Imports this command's module, and no other command's."""
        return importlib.import_module(self.module)


# These import JAX, or packages that only some options of a command need.
LATER = {
    "plan calibrate": "jaxptd.commands.calibrate",
    "plan validate": "jaxptd.commands.validate",
    "compiler": "jaxptd.compiling",
    "models of Hugging Face": "jaxptd.hf.load",
    "processes of a doctor": "jaxptd.doctor.processes",
    "devices of a doctor": "jaxptd.doctor.devices",
    "links of a doctor": "jaxptd.doctor.links",
}
COMMANDS = (
    Command("train", "jaxptd.train", "train a model on a mesh of devices, or resume a run"),
    Command(
        "launch", "jaxptd.commands.launch", "train in several processes here, and restart them"
    ),
    Command(
        "generate", "jaxptd.generate", "generate text (or image masks) with the model of a run"
    ),
    Command("chat", "jaxptd.chat", "talk with the model of a run, as its chat template writes it"),
    Command("data", "jaxptd.commands.data", "tokenize text once into a file, to start runs faster"),
    Command("convert", "jaxptd.hf.convert", "convert models to and from Hugging Face directories"),
    Command("verify", "jaxptd.verify", "prove that a layout computes what one device computes"),
    Command("comms", "jaxptd.comms", "count the bytes that a training step moves between devices"),
    Command(
        "memory", "jaxptd.memory", "predict the memory that a training step needs on each device"
    ),
    Command(
        "plan", "jaxptd.plan", "find the fastest layouts for given GPUs, without running anything"
    ),
    Command("profile", "jaxptd.profile", "measure where the time of a training step goes"),
    Command("mesh", "jaxptd.commands.mesh", "draw the mesh of a layout and list its rank groups"),
    Command("pipeline", "jaxptd.commands.pipeline", "draw and compare pipeline schedules"),
    Command(
        "doctor", "jaxptd.commands.doctor", "check a machine or a cluster, on a page for a report"
    ),
    Command(
        "completion",
        "jaxptd.commands.completion",
        "print a script that completes commands and options in a shell",
    ),
)


def find_command(name: str) -> Command:
    """The command with this name.

    Raises:
        UserError: there is none; the message suggests the nearest name.
    """
    names = {command.name: command for command in COMMANDS}
    if name in names:
        return names[name]
    remedy = did_you_mean(name, names, otherwise=f"use one of {', '.join(names)}")
    raise UserError(f"unknown command {name[:80]!r}; {remedy}")


def later(name: str) -> Any:
    """Imports one of the modules in `LATER`."""
    return importlib.import_module(LATER[name])
