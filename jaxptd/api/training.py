"""The steps of a run, which log, evaluate and save on the way."""

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial

from jaxptd.analysis.memory_needs import out_of_memory_explained
from jaxptd.api.run import Run
from jaxptd.config import Config
from jaxptd.distributed import coordination
from jaxptd.distributed.stop import Stop
from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.hf.base import keep_base
from jaxptd.hf.load import first_state
from jaxptd.models.families import family_of
from jaxptd.run.checkpoints import failed_saves_explained
from jaxptd.run.folder import Row, check_alike
from jaxptd.run.generator import final_sample
from jaxptd.run.progress import Display, Meter
from jaxptd.run.trace import StepTrace
from jaxptd.run.warnings import how_to_resume, nothing_left
from jaxptd.vision.masks import PREDICTIONS, final_picture, of_pixels

OnLog = Callable[[Row], object]


@dataclasses.dataclass(frozen=True)
class Training:
    """The steps of a run, which log, evaluate and save on the way.

    Args:
        run: has the state.
        display: shows the progress.
        stop: asked for by a signal.
        on_log: called with each row of metrics.
    """

    run: Run
    display: Display
    stop: Stop
    on_log: OnLog | None

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def watchdog(self) -> Watchdog:
        return self.run.watchdog

    def start(self) -> None:
        """Restores or makes the state, and opens the run directory if there are steps to run.

        Raises:
            UserError: the processes disagree on the config, the data or the step, or another run
                was in the run directory since it was checked.
        """
        run = self.run
        run.run_dir.check(self.config)
        facts = {
            "the number of training tokens": run.data.train.num_tokens,
            "the tokens of the data": list(run.data.identity.values()),
        }
        check_alike(self.config, facts)
        begins = not run.checkpoints.store.steps()
        with out_of_memory_explained(run.program):
            run.arrays = run.checkpoints.start(partial(first_state, run.program, say=run.say))
        remedy = "train.run_dir must be the same directory for all processes"
        coordination.check_alike("alike.step", {"the step to go on from": run.step}, remedy=remedy)
        if run.step >= self.config.train.steps:
            self.display.say(nothing_left(self.config, run.step))
            return
        run.run_dir.open(self.config, step=run.step)
        keep_base(run.run_dir, self.config, say=run.say, anew=begins)
        with failed_saves_explained():
            run.checkpoints.begin(run.step)

    def train(self) -> None:
        """Runs the remaining steps.

        Raises:
            UserError: too many steps in a row were skipped, a parameter or validation loss is not
                finite (such a state is never saved), or a checkpoint cannot be saved.
        """
        run, done, end = self.run, self.run.step, self.config.train.steps
        if done >= end:
            return
        waiting = partial(self.watchdog.phase, Phase.WAITING)
        with (
            contextlib.closing(run.run_dir),
            failed_saves_explained(),
            out_of_memory_explained(run.program),
            self.display.steps(done=done, total=end),
            self.stop.listening(),
            run.checkpoints.store,
            StepTrace(self.config, run.path, self.watchdog, say=self.display.say) as trace,
        ):
            meter = Meter(run.program, done, check=run.health.check_step, waiting=waiting)
            for step in self.watchdog.steps(done + 1, end):
                trace.begin(step, meter)
                first = (step - 1) * self.config.train.global_batch_size
                batch = run.read_batch(run.data.train, first)
                program = run.program.train_step
                with run.programs.ready("train_step", program, run.arrays, batch) as train_step:
                    run.arrays, metrics = train_step(run.arrays, batch)
                meter.add(step, metrics)
                stopping = self.stop.after(step)  # a signal from here on ends the next step
                self._after_step(step, meter, last=stopping or step == end)
                trace.end(step, meter)
                if stopping:
                    run.stopped = True
                    self.display.say(f"stopped at step {step}: {how_to_resume(self.config)}")
                    break
            with self.watchdog.phase(Phase.SAVING):
                meter.wait()
                run.health.check_params(run.step, run.arrays["params"])
                run.checkpoints.store.wait()

    def finish(self) -> None:
        """Samples a text, or draws pictures, at the end of a run that nobody stopped."""
        with self.watchdog.phase(Phase.WAITING):
            stopped = self.stop.asked_anywhere()
        run = self.run
        writing = family_of(self.config.model).writing
        continues = writing is not None and writing.continues
        data = run.data.validation
        if stopped:
            return
        with self.watchdog.phase(Phase.SAMPLING):
            if continues and self.config.train.sample_tokens:
                self.display.say(final_sample(run.sample, self.config, run.tokenizer, data))
            if of_pixels(self.config) and data is not None:
                path = run.path / PREDICTIONS
                self.display.say(final_picture(run.classes, self.config, data, path))

    # ---- in a step --------------------------------------------------------------------------

    def _after_step(self, step: int, meter: Meter, *, last: bool) -> None:
        """Logs, evaluates and saves, if it is time to."""
        if row := self._row(step, meter, last=last):
            self._log(row, meter.seconds_left())
        if _due(step, self.config.checkpoint.every, last) and (last or not meter.skipping):
            with meter.paused("save"), self.watchdog.phase(Phase.SAVING):
                self.run.checkpoint(step, row)
                if last:
                    self.run.checkpoints.store.wait()
        self.display.advance(step, meter.seconds_left())

    def _row(self, step: int, meter: Meter, *, last: bool) -> Row | None:
        """This step's row of metrics.jsonl, if one is due, with an evaluation, if one is due."""
        train = self.config.train
        evaluating = self.run.data.validation is not None and _due(step, train.eval_every, last)
        if not evaluating and not _due(step, train.log_every, last):
            return None
        row = meter.row()
        if not evaluating:
            return row
        with meter.paused("evaluation"), self.watchdog.phase(Phase.EVALUATING):
            evaluation = self.run.evaluate()
        self.run.health.check_evaluation(step, evaluation)
        return row | evaluation

    def _log(self, row: Row, seconds_left: float | None) -> None:
        self.run.run_dir.log(row)
        if self.on_log and coordination.is_first():
            self.on_log(row)
        self.display.report(row, seconds_left=seconds_left)


def _due(step: int, every: int, last: bool) -> bool:
    return every > 0 and (step % every == 0 or last)
