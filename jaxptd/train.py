"""Training: `python -m jaxptd.train --config configs/quickstart.yaml [--layout.tp 2 ...]`.

Builds the mesh, makes or restores the state, runs the steps, logs, evaluates and saves, and at the
end samples a text. The same command resumes a killed run from its newest good checkpoint. SIGINT or
SIGTERM finishes the step, saves and stops.
"""

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

from jaxptd.checkpoint import CheckpointError
from jaxptd.config import Config
from jaxptd.config.command_line import make_parser, parse
from jaxptd.data import Data, Windows, load_tokenizer, open_data
from jaxptd.data.tokenizers import Tokenizer, with_vocabulary
from jaxptd.distributed import coordination
from jaxptd.distributed.launchers import World, find
from jaxptd.distributed.liveness import RESUME, Liveness
from jaxptd.distributed.stop import Stop
from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.errors import UserError, run_command
from jaxptd.generate import Sampling, write_text
from jaxptd.mesh import make_mesh
from jaxptd.run.batches import read_batch
from jaxptd.run.checkpoints import RunCheckpoints, without_best
from jaxptd.run.devices import prepare
from jaxptd.run.folder import Row, RunDir, check_alike
from jaxptd.run.health import Health
from jaxptd.run.lock import RunLock
from jaxptd.run.meter import Meter
from jaxptd.run.programs import Programs
from jaxptd.run.progress import Display, Output, summary
from jaxptd.run.streams import OptionalStream
from jaxptd.step import Batch, Program, State

SAMPLE_PROMPT = "def "


def main(argv: Sequence[str] | None = None) -> int:
    """Trains a model on a mesh of devices."""
    parser = make_parser("python -m jaxptd.train", main.__doc__ or "")
    config, _ = parse(parser, argv)
    world = find(config.processes, os.environ)
    coordination.join(world, config.processes, devices=config.layout.num_devices)
    config = dataclasses.replace(config, processes=config.processes.anywhere())
    display = Display(Output(file=OptionalStream(sys.stdout)))
    watchdog = Watchdog(config.processes.stuck_after)
    lock = RunLock(config.train.run_dir, say=display.say)
    liveness = Liveness(world, watchdog, report=display.say, before_exit=lock.release)
    with liveness.watching():
        lock.check()
        run = make_run(config, world, display=display, watchdog=watchdog)
        with lock.held():
            state, stop = run.start(), Stop(alone=world.alone)
            state = run.train(state, stop)
            run.finish(state, stop)
    return 0


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

    @cached_property
    def health(self) -> Health:
        return Health(self.config.train.max_skipped, self._good_steps)

    @cached_property
    def programs(self) -> Programs:
        return Programs(self.watchdog)

    def start(self) -> State:
        """Restores or makes the state, and opens the run directory if there are steps to run.

        Raises:
            UserError: the processes disagree on the config, the data or the step, or another run
                was in the run directory since it was checked.
        """
        self.run_dir.check(self.config)
        check_alike(self.config, {"the number of training tokens": len(self.data.train.tokens)})
        state = self.checkpoints.start()
        step = int(state["step"])
        remedy = "train.run_dir must be the same directory for all processes"
        coordination.check_alike("alike.step", {"the step to go on from": step}, remedy=remedy)
        if step >= self.config.train.steps:
            self.display.say(self._nothing_left(step))
            return state
        self.run_dir.open(self.config, step=step)
        with _failed_saves_explained():
            self.checkpoints.begin(step)
        return state

    def train(self, state: State, stop: Stop) -> State:
        """Runs the remaining steps, logging, evaluating and saving on the way.

        Raises:
            UserError: too many steps in a row were skipped, a parameter or validation loss is not
                finite (such a state is never saved), or a checkpoint cannot be saved.
        """
        done, end = int(state["step"]), self.config.train.steps
        if done >= end:
            return state
        waiting = partial(self.watchdog.phase, Phase.WAITING)
        with (
            _failed_saves_explained(),
            self.display.steps(done=done, total=end),
            stop.listening(),
            self.checkpoints.store,
        ):
            meter = Meter(self.program, done, check=self.health.check_step, waiting=waiting)
            for step in self.watchdog.steps(done + 1, end):
                first = (step - 1) * self.config.train.global_batch_size
                batch = self._read(self.data.train, first)
                program = self.program.train_step
                with self.programs.ready("train_step", program, state, batch) as train_step:
                    state, metrics = train_step(state, batch)
                meter.add(step, metrics)
                stopping = stop.after(step)  # read once: a signal from here on ends the next step
                self._after_step(state, step, meter, last=stopping or step == end)
                if stopping:
                    self.display.say(f"stopped at step {step}: {self._how_to_resume()}")
                    break
            with self.watchdog.phase(Phase.SAVING):
                meter.wait()
                self.health.check_params(int(state["step"]), state["params"])
                self.checkpoints.store.wait()
        return state

    def evaluate(self, state: State) -> dict[str, float]:
        """Mean loss, nats a token, over the first `eval_batches` batches of the validation part."""
        windows = self.data.validation
        if windows is None:
            return {}
        size, number = self.config.train.global_batch_size, windows.windows_per_epoch
        batches = min(self.config.train.eval_batches, math.ceil(number / size))
        sums = []
        for i in range(batches):
            batch = self._read(windows, i * size, beyond=number)
            program, params = self.program.eval_step, state["params"]
            with self.programs.ready("eval_step", program, params, batch) as eval_step:
                sums.append(eval_step(params, batch))
        loss = sum(float(s["loss_sum"]) for s in sums) / sum(int(s["tokens"]) for s in sums)
        return {"validation_loss": loss, "perplexity": math.exp(min(loss, 700))}

    def save(self, state: State, step: int, row: Row | None) -> None:
        """Saves the state after a step, with that step's evaluation if its row has one."""
        self.health.check_params(step, state["params"])
        self.checkpoints.save(state, step, row)

    def finish(self, state: State, stop: Stop) -> None:
        """Samples a text at the end of a run that nobody stopped."""
        with self.watchdog.phase(Phase.WAITING):
            stopped = stop.asked_anywhere()
        if not stopped and self.config.train.sample_tokens:
            with self.watchdog.phase(Phase.SAMPLING):
                self.display.say(self._sample(state))

    # ---- in a step --------------------------------------------------------------------------

    def _read(self, windows: Windows, first: int, *, beyond: float = math.inf) -> Batch:
        end = self.tokenizer.end_of_document
        with self.watchdog.phase(Phase.READING):
            return read_batch(
                self.program, windows, first=first, end_of_document=end, beyond=beyond
            )

    def _after_step(self, state: State, step: int, meter: Meter, *, last: bool) -> None:
        """Logs, evaluates and saves, if it is time to."""
        if row := self._row(state, step, meter, last=last):
            self._log(row)
        if _due(step, self.config.checkpoint.every, last) and (last or not meter.skipping):
            with meter.paused(), self.watchdog.phase(Phase.SAVING):
                self.save(state, step, row)
                if last:
                    self.checkpoints.store.wait()
        self.display.advance(step)

    def _row(self, state: State, step: int, meter: Meter, *, last: bool) -> Row | None:
        """This step's row of metrics.jsonl, if one is due, with an evaluation, if one is due."""
        train = self.config.train
        evaluating = self.data.validation is not None and _due(step, train.eval_every, last)
        if not evaluating and not _due(step, train.log_every, last):
            return None
        row = meter.row()
        if not evaluating:
            return row
        with meter.paused(), self.watchdog.phase(Phase.EVALUATING):
            evaluation = self.evaluate(state)
        self.health.check_evaluation(step, evaluation)
        return row | evaluation

    def _log(self, row: Row) -> None:
        self.run_dir.log(row)
        left = (self.config.train.steps - row["step"]) * row["step_time"]
        self.display.report(row, seconds_left=left)

    def _good_steps(self) -> list[int]:
        with self.watchdog.phase(Phase.SAVING):
            return self.checkpoints.good_steps()

    def _nothing_left(self, step: int) -> str:
        return (
            f"nothing left to do: {self.run_dir.path} is at step {step}, "
            f"train.steps={self.config.train.steps}; raise train.steps to train on"
        )

    def _how_to_resume(self) -> str:
        checkpoint = self.config.checkpoint
        if checkpoint.every == 0:
            return "nothing saved, checkpoint.every is 0"
        how = "the same command" if checkpoint.resume == "auto" else "checkpoint.resume=auto"
        return f"saved; {how} goes on"

    def _sample(self, state: State) -> str:
        train = self.config.train
        try:
            text = write_text(
                self.program,
                state["params"],
                self.tokenizer,
                prompt=SAMPLE_PROMPT,
                tokens=train.sample_tokens,
                sampling=Sampling(seed=train.seed),
            )
        except UserError as error:  # token files whose vocabulary does not hold the prompt
            return f"no sample: {error}"
        rule = "-" * 72
        return f"{rule}\n{text}\n{rule}"


def make_run(config: Config, world: World, *, display: Display, watchdog: Watchdog) -> Run:
    """Makes and checks all that a run needs; writes nothing.

    Raises:
        UserError: bad data, another run in run_dir, or too few devices.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    config = with_vocabulary(config)
    run_dir = RunDir(config.train.run_dir, say=display.say)
    run_dir.check(config)
    data = open_data(
        config.data,
        tokenizer,
        seq_length=config.model.seq_length,
        vocab_size=config.model.vocab_size or tokenizer.vocab_size,
        seed=config.train.seed,
    )
    devices = prepare(config, world=world)
    program = Program(config, make_mesh(config.layout))
    display.say(summary(program, devices, data))
    if data.validation is not None and (warning := without_best(config)):
        display.say(warning)
    return Run(program, data, tokenizer, run_dir, display, watchdog)


def _due(step: int, every: int, last: bool) -> bool:
    return every > 0 and (step % every == 0 or last)


@contextlib.contextmanager
def _failed_saves_explained() -> Iterator[None]:
    """Inside, a checkpoint that cannot be saved is an error with a remedy."""
    try:
        yield
    except CheckpointError as error:
        raise UserError(f"{error}; mend that (free some space, say), and {RESUME}") from error


if __name__ == "__main__":
    run_command(main)
