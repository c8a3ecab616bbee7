"""Training: `python -m jaxptd.train --config configs/quickstart.yaml [--layout.tp 2 ...]`.

Builds the mesh, makes or restores the state, runs the steps, logs, evaluates, saves, and samples a
text at the end. The same command resumes a killed run from its newest good checkpoint. On SIGINT,
SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 a run finishes its step, saves and stops. From Python:
`jaxptd.train(config)`.
"""

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

from jaxptd.analysis.memory_needs import out_of_memory_explained, require_fits
from jaxptd.api.run import Run, open_corpus
from jaxptd.checkpoint.saving import run_on_first
from jaxptd.commands.run_options import read_run
from jaxptd.commands.train_options import parser
from jaxptd.config import Config
from jaxptd.config.elastic import for_all_processes, for_processes
from jaxptd.config.training import RANDOM
from jaxptd.display import callable_module
from jaxptd.distributed import coordination
from jaxptd.distributed.launchers import World, find
from jaxptd.distributed.liveness import Liveness
from jaxptd.distributed.stop import Stop
from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.doctor.packages import dangerous, versions
from jaxptd.errors import run_command
from jaxptd.fields import checked
from jaxptd.hf.base import keep_base
from jaxptd.hf.load import first_state
from jaxptd.mesh import make_mesh, on_gpus
from jaxptd.models.families import family_of, tokenizer_of, with_vocabulary
from jaxptd.run import reference
from jaxptd.run.checkpoints import failed_saves_explained, require_metric, without_best
from jaxptd.run.devices import prepare
from jaxptd.run.folder import Row, RunDir, check_alike
from jaxptd.run.generator import final_sample
from jaxptd.run.lock import lock_of
from jaxptd.run.patience import Patience
from jaxptd.run.progress import Display, Meter, OptionalStream, Output, make_display, summary
from jaxptd.run.recheck import Recheck, require_copies
from jaxptd.run.slowest import PhaseTimes, Slowest
from jaxptd.run.trace import StepTrace
from jaxptd.run.warnings import how_to_resume, nothing_left, remarks
from jaxptd.step import Program, State
from jaxptd.stores import place
from jaxptd.vision.masks import PREDICTIONS, final_picture, of_pixels

OnLog = Callable[[Row], object]


def main(argv: Sequence[str] | None = None) -> int:
    """Trains a model on a mesh of devices, or resumes the run in its directory."""
    config, options = read_run(parser(), argv, new=True)
    output = Output(file=OptionalStream(sys.stdout))
    with session(config, make_display(output, **options)) as training:
        training.train()
        training.finish()
    return training.stop.exit_code


@checked("jaxptd.train")
def train(config: Config, *, on_log: OnLog | None = None, quiet: bool = False) -> Run:
    """Trains a model and shows progress. Resumes the run in `train.run_dir` if there is one.

    >>> import jaxptd
    >>> config = jaxptd.load_config("test-tiny", ["--train.steps=2", "--train.run_dir=run"])
    >>> run = jaxptd.train(config, quiet=True)
    >>> run.metrics["step"], run.step
    (array([1, 2]), 2)

    An interrupt (Ctrl-C, or a notebook's stop button) ends the step, saves, and returns the run
    with `run.stopped` True; a second one raises KeyboardInterrupt at once.

    Args:
        config: what to train, and on which layout.
        on_log: called with each row of metrics.jsonl, in the first process.
        quiet: print nothing.

    Raises:
        UserError: bad data, another run in the directory, too few devices, or a diverging run.
    """
    output = Output()
    output.quiet |= quiet
    with session(config, Display(output), on_log=on_log, patient=True) as training:
        training.train()
    return training.run


# ---- the loop over steps -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Training:
    """Runs the steps of a run, and logs, evaluates and saves on the way.

    Args:
        run: holds the state.
        display: shows progress.
        stop: set by a signal that asks the run to stop.
        slowest: compares the processes.
        on_log: called with each row of metrics.
        given: the config before an elastic run shrank.
    """

    run: Run
    display: Display
    stop: Stop
    slowest: Slowest
    on_log: OnLog | None
    given: Config

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def watchdog(self) -> Watchdog:
        return self.run.watchdog

    @cached_property
    def patience(self) -> Patience:
        """Counts evaluations without improvement, from those of the restored run on."""
        if not self.config.train.patience:
            return Patience(self.config)
        step, metric = self.run.step, self.config.checkpoint.best_metric

        def evaluations() -> list[Row]:
            rows = self.run.run_dir.rows_until(step)
            return [{"step": row["step"], metric: row.get(metric)} for row in rows]

        return Patience(self.config, run_on_first("patience", evaluations))

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
        coordination.check_alike("alike.step", {"the step to resume from": run.step}, remedy=remedy)
        if run.step >= self.config.train.steps:
            self.display.say(nothing_left(self.config, run.step))
            return
        if self.patience.is_over():
            self.display.say(f"nothing left to do: {self.patience.reason()}; raise train.patience")
            return
        if run.step:
            reference.require(run.run_dir, run.data)
        run.run_dir.open(for_all_processes(self.config, self.given), step=run.step)
        keep_base(run.run_dir, self.config, say=run.say, anew=begins)
        self._compute_reference()
        with failed_saves_explained():
            run.checkpoints.begin(run.step)

    def _compute_reference(self) -> None:
        """Computes what the model that a run begins with says of its pairs, if it has any."""
        run, size = self.run, self.config.train.global_batch_size
        pairs = dict(reference.sets_of_pairs(run.data))
        if not pairs or run.step:
            return
        if self.config.checkpoint.start in (None, RANDOM):
            run.say(
                "warning: model.preference compares with a model of random weights; name a tuned "
                "one with checkpoint.start or --from"
            )
        number = sum(len(each.ends) for each in pairs.values())
        run.say(f"{number:,} pairs: computing their log-probabilities before the first step")
        total = sum(reference.batches_of(each, size) for each in pairs.values())
        done = itertools.count(1)
        with self.watchdog.phase(Phase.EVALUATING), self.display.steps(done=0, total=total):
            for samples in pairs.values():
                reference.compute(run, samples, advance=lambda: self.display.advance(next(done)))
        reference.write(run.run_dir, run.data)

    def train(self) -> None:
        """Runs the remaining steps.

        Raises:
            UserError: too many steps in a row were skipped, a parameter or validation loss is not
                finite (such a state is never saved), or a checkpoint cannot be saved.
        """
        run, done, end = self.run, self.run.step, self.config.train.steps
        if done >= end or self.patience.is_over():
            with contextlib.closing(run.run_dir), failed_saves_explained():
                run.checkpoints.complete(run.arrays, done)
            return
        waiting = partial(self.watchdog.phase, Phase.WAITING)
        with (
            contextlib.closing(run.run_dir),
            failed_saves_explained(),
            out_of_memory_explained(run.program),
            self.display.steps(done=done, total=end),
            self.stop.listening(),
            run.checkpoints.keeping(run.arrays, done),
            run.checkpoints.store,
            StepTrace(self.config, run.path, self.watchdog, say=self._say_of_files) as trace,
        ):
            meter = Meter(run.program, done, check=run.health.check_step, waiting=waiting)
            program = run.program.train_step  # `StepBody.train`, compiled for the mesh
            recheck = self._recheck()
            for step in self.watchdog.steps(done + 1, end):
                trace.begin(step, meter)
                first = (step - 1) * self.config.train.global_batch_size
                batch = run.read_batch(run.data.train, first)
                with run.programs.ready("train_step", program, run.arrays, batch) as train_step:
                    run.arrays, metrics = train_step(run.arrays, batch)
                run.arrays = recheck(step, batch, run.arrays, metrics)
                meter.add(step, metrics)
                stopping = self.stop.after(step)  # a signal from here on stops after the next step
                self._after_step(step, meter, last=stopping or step == end)
                trace.end(step, meter)
                if self.patience.is_over():
                    self.display.say(f"ended at step {step}: {self.patience.reason()}")
                    break
                if stopping:
                    run.stopped = True
                    self.display.say(f"stopped at step {step}: {how_to_resume(self.config)}")
                    break
            with self.watchdog.phase(Phase.SAVING):
                meter.wait()
                run.health.check_params(run.step, run.arrays["params"])
                run.checkpoints.store.wait()

    def finish(self) -> None:
        """Samples a text, or draws pictures, at the end of a run that was not stopped."""
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
                self._say_of_files(final_picture(run.classes, self.config, data, path))
                run.run_dir.publish()

    def _say_of_files(self, line: str) -> None:
        """Prints a line about files of the run, with their URLs if it is in a store."""
        self.display.say(line.replace(str(self.run.path), str(self.run.run_dir.where)))

    # ---- in a step --------------------------------------------------------------------------

    def _recheck(self) -> Recheck:
        run = self.run

        def save(state: State, step: int) -> None:
            run.health.check_params(step, state["params"])
            run.checkpoints.save(state, step, None)

        return Recheck(
            run.program,
            run.programs,
            self.watchdog,
            save=save,
            good_steps=run.checkpoints.good_steps,
            say=self.display.say,
        )

    def _after_step(self, step: int, meter: Meter, *, last: bool) -> None:
        """Logs, evaluates and saves where due."""
        if row := self._row(step, meter, last=last):
            self._log(row, meter.seconds_left())
            self.patience.add(row)
            last |= self.patience.is_over()
        if _due(step, self.config.checkpoint.memory_every, last=False) and not meter.skipping:
            with meter.paused(None), self.watchdog.phase(Phase.SAVING):
                self.run.keep(step)
        if _due(step, self.config.checkpoint.every, last) and (last or not meter.skipping):
            with meter.paused("save"), self.watchdog.phase(Phase.SAVING):
                self.run.checkpoint(step, row)
                if last:
                    self.run.checkpoints.store.wait()
        self.display.advance(step, meter.seconds_left())

    def _row(self, step: int, meter: Meter, *, last: bool) -> Row | None:
        """This step's row of metrics.jsonl if one is due, with an evaluation if one is due."""
        train = self.config.train
        evaluating = bool(self.run.data.evaluated) and _due(step, train.eval_every, last)
        if not evaluating and not _due(step, train.log_every, last):
            return None
        row = meter.row() | self.slowest.row()
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


# ---- what is made before it ----------------------------------------------------------------------


@contextlib.contextmanager
def session(
    config: Config, display: Display, *, on_log: OnLog | None = None, patient: bool = False
) -> Iterator[Training]:
    """Joins the processes of a run and starts it; inside, all end together if one fails.

    Args:
        config: of the run.
        display: shows progress.
        on_log: see `train`.
        patient: never end a single-process run because a step takes too long.
    """
    world = find(config.processes, os.environ)
    given, config = config, for_processes(config, world.count)
    coordination.join(world, config.processes, devices=config.layout.num_devices)
    config = dataclasses.replace(config, processes=config.processes.anywhere())
    watchdog = PhaseTimes(0.0 if patient and world.alone else config.processes.stuck_after)
    lock = lock_of(config.train.run_dir, say=display.say)
    liveness = Liveness(world, watchdog, report=display.say, before_exit=lock.release)
    end = None if patient else partial(_end_at_once, display, liveness)
    stop = Stop(alone=world.alone, on_asked=display.stopping, end=end)
    factor = config.processes.slow_factor
    slowest = Slowest(world, watchdog, factor=factor, report=display.say)
    with stop.watching(), liveness.watching(), slowest.watching():
        lock.check()
        run = make_run(config, world, display=display, watchdog=watchdog, may_write=lock.require)
        with lock.held():
            training = Training(run, display, stop, slowest, on_log, given)
            training.start()
            yield training


def _end_at_once(display: Display, liveness: Liveness, code: int) -> None:
    """Ends the process at a second signal, even while its main thread is inside JAX."""
    display.close()
    liveness.interrupted(code)


def make_run(
    config: Config,
    world: World,
    *,
    display: Display,
    watchdog: Watchdog,
    may_write: Callable[[], None] = lambda: None,
) -> Run:
    """Makes and checks everything a run needs except its state; writes nothing.

    Raises:
        UserError: bad data, another run in run_dir, or too few devices.
    """
    for name in ("resume", "start"):
        place(str(getattr(config.checkpoint, name)), field=f"checkpoint.{name}")
    require_metric(config)
    tokenizer = tokenizer_of(config)
    config = with_vocabulary(config)
    run_dir = RunDir(config.train.run_dir, say=display.say, may_write=may_write)
    run_dir.check(config)
    data = open_corpus(config, tokenizer)
    devices = prepare(config, world=world)
    program = Program(config, make_mesh(config.layout))
    require_copies(program)
    require_fits(program)
    display.say(summary(program, devices, data))
    for remark in data.remarks:
        display.say(remark)
    kinds = {device.device_kind for device in program.mesh.devices.flat}
    bad = dangerous(versions(), kinds, on_gpus=on_gpus(program.mesh))
    for remark in (*bad, *remarks(program)):
        display.say(f"warning: {remark}")
    if data.evaluated and (warning := without_best(config)):
        display.say(warning)
    return Run(program, tokenizer, lambda: data, run_dir, display.say, watchdog)


callable_module(__name__)
if __name__ == "__main__":
    run_command(main)
