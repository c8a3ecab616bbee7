"""Training: `python -m jaxptd.train --config configs/quickstart.yaml [--layout.tp 2 ...]`.

Builds the mesh, makes or restores the state, runs the steps, logs, evaluates, saves, and at the end
lets the model write. A run that was killed goes on from its newest good checkpoint when the same
command is given again; SIGINT or SIGTERM ends the step, saves and stops.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np

from jaxptd.checkpoint import CheckpointError
from jaxptd.config import Config
from jaxptd.config.command_line import make_parser, parse
from jaxptd.data import Data, Windows, load_tokenizer, number_documents, open_data
from jaxptd.data.tokenizers import Tokenizer, with_vocabulary
from jaxptd.distributed import coordination as processes
from jaxptd.distributed.launchers import World, find
from jaxptd.distributed.liveness import GO_ON, Liveness
from jaxptd.distributed.stop import Stop
from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.errors import UserError, run_command
from jaxptd.generate import Sampling, write_text
from jaxptd.mesh import make_mesh
from jaxptd.pipeline.statistics import bubble
from jaxptd.run.checkpoints import RunCheckpoints, without_best
from jaxptd.run.devices import prepare
from jaxptd.run.folder import ReadOnlyRunDir, Row, RunDir, check_alike
from jaxptd.run.progress import Display, Meter, Output, check_finite
from jaxptd.step import Batch, Program, State

SAMPLE_PROMPT = "def "


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: its program, data and outputs."""

    program: Program
    data: Data
    tokenizer: Tokenizer
    run_dir: RunDir
    display: Display
    watchdog: Watchdog

    @property
    def config(self) -> Config:
        return self.program.config

    @cached_property
    def checkpoints(self) -> RunCheckpoints:
        return RunCheckpoints(self.program, self.run_dir, self.display.say)

    def batch(self, windows: Windows, first: int, *, beyond: int | None = None) -> Batch:
        """The batch of samples `first`, `first + 1`, ...; each device reads its own rows.

        Args:
            windows: of training or validation.
            first: sample number of its first row.
            beyond: samples from here on count for nothing.
        """

        def rows_of(field: str, numbers: slice) -> np.ndarray:
            sample = first + np.arange(self.config.train.global_batch_size)[numbers]
            rows = windows.rows(sample)
            if field == "targets":
                counts = sample < (math.inf if beyond is None else beyond)
                return np.where(counts[:, None], rows[:, 1:], -1)
            if field == "segments":
                return number_documents(rows[:, :-1], self.tokenizer.end_of_document)
            return rows[:, :-1]

        return self.program.batches.read(rows_of)

    def evaluate(self, state: State) -> dict[str, float]:
        """Mean loss, nats a token, over the first `eval_batches` batches of the validation part."""
        windows = self.data.validation
        if windows is None:
            return {}
        size, number = self.config.train.global_batch_size, windows.windows_per_epoch
        batches = min(self.config.train.eval_batches, math.ceil(number / size))
        sums = []
        for i in range(batches):
            with self.watchdog.phase(Phase.READING):
                batch = self.batch(windows, i * size, beyond=number)
            program = self.program.eval_step
            sums.append(self.watchdog.call("eval_step", program, state["params"], batch))
        loss = sum(float(s["loss_sum"]) for s in sums) / sum(int(s["tokens"]) for s in sums)
        return {"validation_loss": loss, "perplexity": math.exp(min(loss, 700))}

    def save(self, state: State, step: int, row: Row | None) -> None:
        """After a step, whose line of metrics may hold an evaluation."""
        self.checkpoints.save(state, step, row)

    def train(self, state: State, stop: Stop) -> State:
        """Runs the steps that are left, logging, evaluating and saving on the way.

        Raises:
            UserError: too many steps in a row were skipped, or a parameter or validation loss is
                not finite; such a state is never saved.
        """
        train, done = self.config.train, int(state["step"])
        board, saved = self.run_dir.tensorboard(step=done), self.checkpoints.files
        with self.display.steps(done=done, total=train.steps), stop.listening(), saved:
            waiting = partial(self.watchdog.phase, Phase.WAITING)
            meter = Meter(self.program, done, self._saved_steps, waiting)
            for step in self.watchdog.steps(done + 1, train.steps):
                with self.watchdog.phase(Phase.READING):
                    batch = self.batch(self.data.train, (step - 1) * train.global_batch_size)
                program = self.program.train_step
                state, metrics = self.watchdog.call("train_step", program, state, batch)
                meter.add(step, metrics)
                stopping = stop.after(step)  # read once: a signal from here on ends the next step
                last = stopping or step == train.steps
                if row := self._row(state, step, meter, last=last):
                    self._log(row)
                    board(row)
                due = _due(step, self.config.checkpoint.every, last)
                if due and (last or not meter.skipping):
                    with meter.paused(), self.watchdog.phase(Phase.SAVING):
                        meter.check(state["params"])
                        self.save(state, step, row)
                        if last:
                            saved.wait()
                self.display.advance(step)
                if stopping:
                    self.display.say(f"stopped at step {step}: {self._way_on()}")
                    break
            with self.watchdog.phase(Phase.SAVING):
                meter.check(state["params"])
                saved.wait()
        return state

    def _saved_steps(self) -> list[int]:
        """Of the checkpoints there are, once a save that goes on has ended, well or not."""
        with self.watchdog.phase(Phase.SAVING), contextlib.suppress(CheckpointError):
            return self.checkpoints.steps()
        return self.checkpoints.files.good_steps()

    def _row(self, state: State, step: int, meter: Meter, *, last: bool) -> Row | None:
        """This step's line of metrics.jsonl, if one is due, with its evaluation, if that is due."""
        train = self.config.train
        evaluating = self.data.validation is not None and _due(step, train.eval_every, last)
        if not evaluating and not _due(step, train.log_every, last):
            return None
        row = meter.row()
        if not evaluating:
            return row
        with meter.paused(), self.watchdog.phase(Phase.EVALUATING):
            evaluation = self.evaluate(state)
        check_finite(step, evaluation)
        return row | evaluation

    def _log(self, row: Row) -> None:
        self.run_dir.log(row)
        left = (self.config.train.steps - row["step"]) * row["step_time"]
        self.display.report(row, seconds_left=left)

    def _way_on(self) -> str:
        checkpoint = self.config.checkpoint
        if checkpoint.every == 0:
            return "nothing saved, checkpoint.every is 0"
        how = "the same command" if checkpoint.resume == "auto" else "checkpoint.resume=auto"
        return f"saved; {how} goes on"


def _due(step: int, every: int, last: bool) -> bool:
    return every > 0 and (step % every == 0 or last)


def prepare_run(config: Config, world: World, *, display: Display, watchdog: Watchdog) -> Run:
    """Everything a run needs, checked, with nothing written yet.

    Raises:
        UserError: bad data, another run in run_dir, too few devices.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    config = with_vocabulary(config)
    run_dir = (RunDir if world.first else ReadOnlyRunDir)(config.train.run_dir)
    run_dir.check(config)
    data = open_data(
        config.data,
        tokenizer,
        seq_length=config.model.seq_length,
        vocab_size=config.model.vocab_size or tokenizer.vocab_size,
        seed=config.train.seed,
    )
    where = prepare(config, world=world)
    program = Program(config, make_mesh(config.layout))
    display.say(_summary(program, where, data))
    if data.validation is not None and (warning := without_best(config)):
        display.say(warning)
    return Run(program, data, tokenizer, run_dir, display, watchdog)


def _summary(program: Program, where: str, data: Data) -> str:
    parameters = sum(math.prod(info.shape) for info in program.infos.values())
    resolved = program.resolved
    kernel, obstacle = resolved.model.attention, resolved.attention_obstacle
    tokens = len(data.train.tokens)
    layout = str(program.config.layout)
    if resolved.plan:
        layout += f" (bubble {bubble(resolved.plan.schedule):.0%})"
    return (
        f"{parameters / 1e6:.2f} M parameters on {where}, layout {layout}; "
        f"attention: {kernel}{f' (cudnn: {obstacle})' if obstacle else ''}; "
        f"{tokens / 1e6:.2f} M training tokens"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Trains a model on a mesh of devices."""
    parser = make_parser("python -m jaxptd.train", main.__doc__ or "")
    config, _ = parse(parser, argv)
    world = find(config.processes, os.environ)
    processes.join(world, config.processes, devices=config.layout.num_devices)
    config = dataclasses.replace(config, processes=config.processes.anywhere())
    display = Display(Output(quiet=not world.first))
    watchdog = Watchdog(config.processes.stuck_after)
    with Liveness(world, watchdog, report=display.say).watching():
        _run(prepare_run(config, world, display=display, watchdog=watchdog), world)
    return 0


def _run(run: Run, world: World) -> None:
    """From the state that is there to the last step, or until a person stops it."""
    check_alike(run.config, {"the number of training tokens": len(run.data.train.tokens)})
    state = run.checkpoints.start()
    step, stop = int(state["step"]), Stop(alone=world.alone)
    remedy = "train.run_dir must be the same directory for all processes"
    processes.check_alike("alike.step", {"the step to go on from": step}, remedy=remedy)
    run.run_dir.open(run.config, step=step)
    try:
        run.checkpoints.begin(step)
        state = run.train(state, stop)
    except CheckpointError as error:
        raise UserError(f"{error}; mend that (free some space, say), and {GO_ON}") from error
    with run.watchdog.phase(Phase.WAITING):
        stopped = stop.asked_anywhere()
    if not stopped and run.config.train.sample_tokens:
        with run.watchdog.phase(Phase.SAMPLING):
            run.display.say(_sample(run, state))


def _sample(run: Run, state: State) -> str:
    sampling = Sampling(seed=run.config.train.seed)
    tokens = run.config.train.sample_tokens
    try:
        text = write_text(
            run.program,
            state["params"],
            run.tokenizer,
            prompt=SAMPLE_PROMPT,
            tokens=tokens,
            sampling=sampling,
        )
    except UserError as error:  # token files whose vocabulary does not hold the prompt
        return f"no sample: {error}"
    rule = "-" * 72
    return f"{rule}\n{text}\n{rule}"


if __name__ == "__main__":
    run_command(main)
