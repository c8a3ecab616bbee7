"""`jaxptd launch`: runs `jaxptd train` in several processes on this host, and restarts them.

For tests, workstations and single nodes. On clusters Slurm, Kubernetes or torchrun do this.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxptd.commands import train_options
from jaxptd.commands.run_options import read_run
from jaxptd.common_options import add_words, path_option
from jaxptd.config import Config
from jaxptd.config.elastic import for_processes, possible_counts
from jaxptd.distributed.launchers import World
from jaxptd.distributed.supervisor import Supervisor
from jaxptd.errors import QUOTED, Parser, UserError, quoted, read_small, run_command
from jaxptd.stores import StorePath, place

MOST = 512  # processes on one host
COMMAND = "train"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jaxptd train` in several processes on this host; restarts all when one dies."""
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:split])
    command = words[split + 1 :]
    _check(options.processes, options.restarts, command)
    config, _ = read_run(train_options.parser(), command[1:], new=True)
    _check_processes(config, options.processes)
    count = _counted(config, options.processes, options.available)

    def attempt(number: int) -> list[str]:
        resume = _resume(config) if number else []
        return [sys.executable, "-m", "jaxptd", *command, *resume]

    def say(line: str) -> None:
        if not options.quiet:
            print(f"launch: {line}", file=sys.stderr, flush=True)

    watched = options.available is not None
    supervisor = Supervisor(
        attempt, count=count, restarts=options.restarts, say=say, watched=watched
    )
    return supervisor.run()


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd launch -n 2 -- train --config quickstart",
        "jaxptd launch -n 8 --restarts 20 -- train --run-dir runs/gpt2",
    )
    parser = Parser(
        prog="jaxptd launch",
        usage="%(prog)s -n N [--restarts N] [--available F] -- train [options of train]",
        description=main.__doc__,
        examples=examples,
    )
    help_text = "number of processes; the layout's devices are split over them"
    parser.add_argument(
        *("-n", "--processes"), type=int, metavar="N", required=True, help=help_text
    )
    help_text = (
        "file with the number of processes that may run now, at most N; when it changes, a run "
        "with processes.elastic saves, and goes on with as many"
    )
    parser.add_argument("--available", type=path_option, metavar="F", help=help_text)
    help_text = "how often all are started again after one died; default: 0"
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help=help_text)
    add_words(parser, quiet="print no line about deaths, restarts and signals")
    return parser


def _check(count: int, restarts: int, command: Sequence[str]) -> None:
    """Raises UserError for impossible numbers or another command."""
    if not 1 <= count <= MOST:
        raise UserError(f"-n {quoted(count)}: use 1 to {MOST} processes")
    if restarts < 0:
        raise UserError(f"--restarts {quoted(restarts)}: use 0 or more")
    if command[:1] != [COMMAND]:
        given = f"{quoted(command[0])} cannot be launched" if command else "nothing to launch"
        raise UserError(f"{given}; end the line in -- {COMMAND} and its options")


def _check_processes(config: Config, count: int) -> None:
    """Raises UserError if a config says itself what `launch` says, or does not split."""
    for name in ("coordinator", "count", "id"):
        if (value := getattr(config.processes, name)) is not None:
            raise UserError(
                f"processes.{name}={quoted(value)} is for processes that are started by hand; "
                "leave it out under launch"
            )
    World(count).share(for_processes(config, count).layout.num_devices)


def _counted(config: Config, most: int, available: Path | None) -> Callable[[], int]:
    """Makes what says how many processes to start now; 0 if a file says too few.

    Raises:
        UserError: the file has no number, or the run is not elastic.
    """
    if available is None:
        return lambda: most
    if config.processes.elastic is None:
        raise UserError(
            f"--available {quoted(str(available))} has no effect without processes.elastic; set "
            "the fewest and the most processes, [2, 8] for example"
        )
    possible = [count for count in possible_counts(config) if count <= most]
    last = _number_in(available)

    def count() -> int:
        nonlocal last
        with contextlib.suppress(UserError):  # it is being written
            last = _number_in(available)
        return max((each for each in possible if each <= last), default=0)

    return count


def _number_in(path: Path) -> int:
    text = read_small(path, remedy="write the number of processes into it", what="--available")
    if not text.strip().isdecimal() or len(text) > QUOTED:
        raise UserError(
            f"--available {quoted(str(path))} holds {quoted(repr(text))}; write the number of "
            "processes into it"
        )
    return int(text)


def _resume(config: Config) -> list[str]:
    """Options with which a run that has died goes on, whatever its first start resumed from.

    Until it has saved, a start from another run's checkpoint begins there again.
    """
    resume = config.checkpoint.resume
    if resume == "auto" or (resume not in ("best", "never") and not _has_saved(config)):
        return []
    return ["--checkpoint.resume=auto"]


def _has_saved(config: Config) -> bool:
    checkpoints = place(config.train.run_dir, field="train.run_dir") / "checkpoints"
    if isinstance(checkpoints, StorePath):
        listed = checkpoints.store.listing(checkpoints.key)
        return any(key.endswith("/manifest.json") for key in listed)
    return checkpoints.is_dir() and any(name.isdigit() for name in os.listdir(checkpoints))


if __name__ == "__main__":
    run_command(main)
