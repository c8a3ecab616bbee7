"""Training: `python -m jaxptd.train --config configs/quickstart.yaml [--layout.tp 2 ...]`.

Builds the mesh, makes or restores the state, runs the steps, logs, evaluates, saves, and at the end
lets the model write. A run that was killed goes on from its newest good checkpoint when the same
command is given again; SIGINT or SIGTERM ends the step, saves and stops.
"""

import contextlib
import dataclasses
import importlib.util
import math
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxptd.canonical import abstract_canonical, from_canonical, to_canonical
from jaxptd.checkpoint import CheckpointError, Checkpoints, read_description, restore_path
from jaxptd.command_line import make_parser, parse
from jaxptd.config import Config, from_dict, to_dict
from jaxptd.data import Data, Windows, load_tokenizer, open_data
from jaxptd.data.tokenizers import Tokenizer, with_vocabulary
from jaxptd.devices import peak_flops, prepare
from jaxptd.errors import UserError, run_command
from jaxptd.generate import Sampling, write_text
from jaxptd.mesh import make_mesh
from jaxptd.progress import Display
from jaxptd.run_dir import RunDir, difference
from jaxptd.step import Batch, Program, State

SAMPLE_PROMPT = "def "


class Stop:
    """Set by SIGINT or SIGTERM; a second one ends the process at once."""

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in signals}

        def ask(number: int, _: Any) -> None:
            self.asked = True
            for each in signals:
                signal.signal(each, before[each])

        for number in signals:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number in signals:
                signal.signal(number, before[number])


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: its program, data and outputs."""

    program: Program
    data: Data
    tokenizer: Tokenizer
    run_dir: RunDir
    display: Display

    @property
    def config(self) -> Config:
        return self.program.config

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.run_dir.checkpoints, keep=self.config.checkpoint.keep)

    def start(self) -> State:
        """The state to go on from: a checkpoint's, or a new one."""
        resume, target = self.config.checkpoint.resume, abstract_canonical(self.program)
        if resume not in ("auto", "never"):
            _check_same_run(self.config, Path(resume))
            return self._resumed(*restore_path(Path(resume), target), resume)
        found = (
            self.checkpoints.restore_newest(target, report=self._warn) if resume == "auto" else None
        )
        if found is None:
            return self.program.init_state()
        return self._resumed(*found, str(self.run_dir.checkpoints))

    def _resumed(self, step: int, canonical: dict[str, Any], where: str) -> State:
        self.display.say(f"resuming at step {step} from {where}")
        return from_canonical(self.program, canonical)

    def _warn(self, line: str) -> None:
        self.display.say(f"warning: {line}")

    def batch(self, windows: Windows, first: int, *, beyond: int | None = None) -> Batch:
        """The batch of samples `first`, `first + 1`, ...; each device reads its own rows.

        Args:
            windows: of training or validation.
            first: sample number of its first row.
            beyond: samples from here on count for nothing.
        """
        length = self.config.model.seq_length

        def read(index: tuple[slice, ...], shift: int) -> np.ndarray:
            sample = first + np.arange(self.config.train.global_batch_size)[index[0]]
            rows = windows.rows(sample)[:, shift : shift + length]
            if shift and beyond is not None:
                rows = np.where((sample < beyond)[:, None], rows, -1)
            return rows[:, index[1]]

        shape = (self.config.train.global_batch_size, length)
        make = jax.make_array_from_callback
        return {
            name: make(
                shape, self.program.batch_sharding, lambda index, shift=shift: read(index, shift)
            )
            for name, shift in (("tokens", 0), ("targets", 1))
        }

    def evaluate(self, state: State) -> dict[str, float]:
        """Mean loss, nats a token, over the first `eval_batches` batches of the validation part."""
        windows = self.data.validation
        if windows is None:
            return {}
        size, number = self.config.train.global_batch_size, windows.windows_per_epoch
        batches = min(self.config.train.eval_batches, math.ceil(number / size))
        sums = [
            self.program.eval_step(state["params"], self.batch(windows, i * size, beyond=number))
            for i in range(batches)
        ]
        loss = sum(float(s["loss_sum"]) for s in sums) / sum(int(s["tokens"]) for s in sums)
        return {"validation_loss": loss, "perplexity": math.exp(min(loss, 700))}

    def save(self, state: State, step: int) -> None:
        description = {"config": to_dict(self.config)}
        self.checkpoints.save(step, to_canonical(self.program, state), description=description)

    def train(self, state: State, stop: Stop) -> State:
        """Runs the steps that are left, logging, evaluating and saving on the way."""
        train, done = self.config.train, int(state["step"])
        meter = Meter(self, done)
        saved = done
        with self.display.steps(done=done, total=train.steps), stop.listening():
            for step in range(done + 1, train.steps + 1):
                batch = self.batch(self.data.train, (step - 1) * train.global_batch_size)
                state, metrics = self.program.train_step(state, batch)
                last = step == train.steps or stop.asked
                if _due(step, train.log_every, last) or _due(step, train.eval_every, last):
                    meter.log(
                        step,
                        metrics,
                        self.evaluate(state) if _due(step, train.eval_every, last) else {},
                    )
                self.display.advance(step)
                if _due(step, self.config.checkpoint.every, last):
                    self.save(state, step)
                    saved = step
                if stop.asked:
                    where = (
                        f"saved at step {saved}; the same command goes on"
                        if saved == step
                        else "nothing saved"
                    )
                    self.display.say(f"stopped at step {step}: {where}")
                    break
        return state


def _due(step: int, every: int, last: bool) -> bool:
    return every > 0 and (step % every == 0 or last)


def _check_same_run(config: Config, path: Path) -> None:
    changed = difference(config, from_dict(read_description(path)["config"]))
    if changed:
        raise UserError(
            f"checkpoint.resume={path} is of another run: {changed}; use that run's config"
        )


class Meter:
    """Times steps and writes their metrics; TensorBoard's too where tensorboardX is installed."""

    def __init__(self, run: Run, step: int) -> None:
        self._run, self._step, self._time = run, step, time.perf_counter()
        self._first = step
        self._board = _board(run.run_dir.path / "tensorboard")

    def log(self, step: int, metrics: dict[str, jax.Array], evaluation: dict[str, float]) -> None:
        """Writes one step's row. Raises UserError if the loss is not finite any more."""
        values = {name: float(value) for name, value in metrics.items()}  # waits for the step
        row = {"step": step, **values, **self._speed(step), **evaluation}
        if not math.isfinite(values["loss"]):
            raise UserError(
                f"loss is {values['loss']} at step {step}; use a smaller optimizer.learning_rate, "
                "and resume from the last good checkpoint"
            )
        self._run.run_dir.log(row)
        steps = self._run.config.train.steps
        self._run.display.report(row, seconds_left=(steps - step) * row["step_time"])
        if self._board:
            for name, value in row.items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, step)
        self._step, self._time = step, time.perf_counter()

    def _speed(self, step: int) -> dict[str, Any]:
        """Since the last logged step: the first time with compilation."""
        config, model = self._run.config.train, self._run.program.model
        seconds = (time.perf_counter() - self._time) / max(step - self._step, 1)
        a_step = config.global_batch_size * model.seq_length
        peak = peak_flops(self._run.program.mesh)
        return {
            "tokens": step * a_step,
            "tokens_per_second": a_step / seconds,
            "step_time": seconds,
            "mfu": a_step * self._flops_per_token() / seconds / peak if peak else None,
        }

    def _flops_per_token(self) -> float:
        """6 for each parameter in a product, and attention's 12 L D T (Chowdhery et al., arXiv 2204.02311, B)."""
        model, infos = self._run.program.model, self._run.program.infos
        weights = sum(math.prod(info.shape) for info in infos.values() if info.decay)
        return 6 * weights + 12 * model.num_layers * model.hidden_size * model.seq_length


def _board(path: Path) -> Any:
    if importlib.util.find_spec("tensorboardX") is None:
        return None
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(path))


def prepare_run(config: Config, console: Console) -> Run:
    """Everything a run needs, checked, with nothing written yet.

    Raises:
        UserError: bad data, another run in run_dir, too few devices.
    """
    display = Display(console)
    tokenizer = load_tokenizer(config.data.tokenizer)
    config = with_vocabulary(config)
    run_dir = RunDir(config.train.run_dir)
    run_dir.check(config)
    data = open_data(
        config.data,
        tokenizer,
        seq_length=config.model.seq_length,
        vocab_size=config.model.vocab_size or tokenizer.vocab_size,
        seed=config.train.seed,
    )
    where = prepare(config)
    program = Program(config, make_mesh(config.layout))
    display.say(_summary(program, where, data))
    return Run(program, data, tokenizer, run_dir, display)


def _summary(program: Program, where: str, data: Data) -> str:
    parameters = sum(math.prod(info.shape) for info in program.infos.values())
    kernel, obstacle = program.attention_kernel
    tokens = len(data.train.tokens)
    return (
        f"{parameters / 1e6:.2f} M parameters on {where}, layout {program.config.layout}; "
        f"attention: {kernel}{f' (cudnn: {obstacle})' if obstacle else ''}; {tokens / 1e6:.2f} M training tokens"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Trains a model on a mesh of devices."""
    parser = make_parser("python -m jaxptd.train", main.__doc__ or "")
    config, _ = parse(parser, argv)
    run = prepare_run(config, Console())
    state = run.start()
    step = int(state["step"])
    run.run_dir.open(run.config, step=step)
    stop = Stop()
    try:
        state = run.train(state, stop)
    except CheckpointError as error:
        raise UserError(f"{error}; free some space and give the same command again") from error
    if not stop.asked and run.config.train.sample_tokens:
        run.display.say(_sample(run, state))
    return 0


def _sample(run: Run, state: State) -> str:
    sampling = Sampling(seed=run.config.train.seed)
    tokens = run.config.train.sample_tokens
    text = write_text(
        run.program,
        state["params"],
        run.tokenizer,
        prompt=SAMPLE_PROMPT,
        tokens=tokens,
        sampling=sampling,
    )
    rule = "-" * 72
    return f"{rule}\n{text}\n{rule}"


if __name__ == "__main__":
    run_command(main)
