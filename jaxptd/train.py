"""Training: `python -m jaxptd.train --config configs/quickstart.yaml [--layout.tp 2 ...]`.

Builds the mesh, makes or restores the state, runs the steps, logs, evaluates and saves, and at the
end samples a text. The same command resumes a killed run from its newest good checkpoint. SIGINT,
SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 finishes the step, saves and stops. From Python:
`jaxptd.train(config)`.
"""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from jaxptd.analysis.memory_needs import require_fits
from jaxptd.api.run import Run, open_corpus
from jaxptd.api.training import OnLog, Training
from jaxptd.commands.command_line import ConfigParser
from jaxptd.commands.run_options import USUAL, read_run, run_parser
from jaxptd.common_options import add_words
from jaxptd.config import Config
from jaxptd.display import callable_module
from jaxptd.distributed import coordination
from jaxptd.distributed.launchers import World, find
from jaxptd.distributed.liveness import Liveness
from jaxptd.distributed.stop import Stop
from jaxptd.distributed.watchdog import Watchdog
from jaxptd.errors import run_command
from jaxptd.fields import checked
from jaxptd.mesh import make_mesh
from jaxptd.models.families import tokenizer_of, with_vocabulary
from jaxptd.run.checkpoints import without_best
from jaxptd.run.devices import prepare
from jaxptd.run.folder import RunDir
from jaxptd.run.lock import RunLock
from jaxptd.run.progress import Display, OptionalStream, Output, make_display, summary
from jaxptd.run.warnings import remarks
from jaxptd.step import Program

RUN = (
    *("--data.source", "--data.tokenizer", "--data.special_tokens", "--data.prompt_field"),
    *("--optimizer.learning_rate", "--optimizer.warmup_steps", "--train.steps"),
    "--checkpoint.every",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains a model on a mesh of devices."""
    config, options = read_run(parser(), argv, new=True)
    output = Output(file=OptionalStream(sys.stdout))
    with session(config, make_display(output, **options)) as training:
        training.train()
        training.finish()
    return training.stop.exit_code


@functools.cache
def parser() -> ConfigParser:
    """Makes the parser of this command."""
    examples = (
        "--config quickstart",
        "--config gpt2-124m --data.source data/train.bin --layout.dp 4 --layout.tp 2",
        "--from models/llama --data.source texts.jsonl --run-dir runs/tuned     (fine-tunes)",
        "--run-dir runs/quickstart --train.steps 2400     (resumes a run, on any layout)",
    )
    parser = run_parser("train", main.__doc__ or "", examples=examples, usual=(*USUAL, *RUN))
    quiet = "print nothing but warnings; metrics.jsonl has the numbers"
    add_words(parser, json="rows of metrics and messages, one a line,", quiet=quiet)
    return parser


@checked("jaxptd.train")
def train(config: Config, *, on_log: OnLog | None = None, quiet: bool = False) -> Run:
    """Trains a model, or goes on with the run in `train.run_dir`; shows the progress.

    >>> import jaxptd
    >>> config = jaxptd.load_config("test-tiny", ["--train.steps=2", "--train.run_dir=run"])
    >>> run = jaxptd.train(config, quiet=True)
    >>> run.metrics["step"], run.step
    (array([1, 2]), 2)

    An interrupt (Ctrl-C, or a notebook's stop button) ends the step, saves, and returns the run
    with `run.stopped` True; a second one raises KeyboardInterrupt at once.

    Args:
        config: of the run.
        on_log: called with each row of metrics.jsonl, in the first process.
        quiet: print nothing.

    Raises:
        UserError: bad data, another run in the directory, too few devices, or a run that diverges.
    """
    output = Output()
    output.quiet |= quiet
    with session(config, Display(output), on_log=on_log, patient=True) as training:
        training.train()
    return training.run


@contextlib.contextmanager
def session(
    config: Config, display: Display, *, on_log: OnLog | None = None, patient: bool = False
) -> Iterator[Training]:
    """Joins the processes of a run and starts it; inside, all end together if one fails.

    Args:
        config: of the run.
        display: shows its progress.
        on_log: see `train`.
        patient: a process that is alone is never ended for a step that takes too long.
    """
    world = find(config.processes, os.environ)
    coordination.join(world, config.processes, devices=config.layout.num_devices)
    config = dataclasses.replace(config, processes=config.processes.anywhere())
    watchdog = Watchdog(0.0 if patient and world.alone else config.processes.stuck_after)
    lock = RunLock(config.train.run_dir, say=display.say)
    liveness = Liveness(world, watchdog, report=display.say, before_exit=lock.release)
    end = None if patient else partial(_end_at_once, display, liveness)
    stop = Stop(alone=world.alone, on_asked=display.stopping, end=end)
    with stop.watching(), liveness.watching():
        lock.check()
        run = make_run(config, world, display=display, watchdog=watchdog)
        with lock.held():
            training = Training(run, display, stop, on_log)
            training.start()
            yield training


def _end_at_once(display: Display, liveness: Liveness, code: int) -> None:
    """Ends the process at a second signal, also while its main thread is inside JAX."""
    display.close()
    liveness.interrupted(code)


def make_run(config: Config, world: World, *, display: Display, watchdog: Watchdog) -> Run:
    """Makes and checks all that a run needs, except its state; writes nothing.

    Raises:
        UserError: bad data, another run in run_dir, or too few devices.
    """
    tokenizer = tokenizer_of(config)
    config = with_vocabulary(config)
    run_dir = RunDir(config.train.run_dir, say=display.say)
    run_dir.check(config)
    data = open_corpus(config, tokenizer)
    devices = prepare(config, world=world)
    program = Program(config, make_mesh(config.layout))
    require_fits(program)
    display.say(summary(program, devices, data))
    for remark in data.remarks:
        display.say(remark)
    for remark in remarks(program):
        display.say(f"warning: {remark}")
    if data.validation is not None and (warning := without_best(config)):
        display.say(warning)
    return Run(program, tokenizer, lambda: data, run_dir, display.say, watchdog)


callable_module(__name__)
if __name__ == "__main__":
    run_command(main)
