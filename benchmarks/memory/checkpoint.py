"""Saving and restoring: speed, and how long training waits, beside plain orbax.

`python -m benchmarks.memory.checkpoint [--config FILE --repeats 3 --folder DIR --out FILE]`

The whole state of a model (parameters and two moments, float32) is saved and restored in turns, in
one run, by

- *jaxptd*: `Checkpoints`: everything flushed to the disk (fsync), a CRC-32 of every file, and a
  rename at the end; it restores after every file was read and checked;
- *orbax*: `ocp.save`, `ocp.save_async` and `ocp.load` of the same arrays, which do none of that.

Blocking is the time that the caller waits before it may change the state. Every restored state is
compared with the saved one, bit by bit. The devices are simulated on the CPU, where there is no
copy from a device to the host; the copies that the next step makes instead are not timed.
"""

import argparse
import dataclasses
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.lib.measure import DifferentError, write
from jaxptd.analysis.report import table, versions
from jaxptd.checkpoint import Checkpoints
from jaxptd.checkpoint.arrays import ocp
from jaxptd.checkpoint.canonical import abstract_canonical, to_canonical
from jaxptd.commands.command_line import load_config
from jaxptd.config import Config, TrainConfig
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.mesh import Layout, make_mesh
from jaxptd.run.devices import prepare
from jaxptd.step import Program

CONFIG = Path("configs/gpt2-124m.yaml")
LAYOUTS = (Layout(), Layout(dp=2, tp=4))
TIMES = ("save", "save behind: blocking", "save behind: in all", "restore")


@dataclasses.dataclass
class Way:
    """A way to save and restore, with the seconds of each of TIMES in every turn.

    Args:
        name: of the way.
        save: state and folder -> when all is written.
        save_async: the same, but returns when the state may change; its result waits for the rest.
        restore: folder -> state.
    """

    name: str
    save: Callable[[Any, Path], None]
    save_async: Callable[[Any, Path], Callable[[], None]]
    restore: Callable[[Path], Any]
    seconds: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {name: [] for name in TIMES}
    )

    def turn(self, state: Any, folder: Path) -> None:
        """Saves in both modes and restores, timed. Raises DifferentError."""
        with self._timed("save"):
            self.save(state, folder / "save")
        with self._timed("save behind: in all"):
            with self._timed("save behind: blocking"):
                wait = self.save_async(state, folder / "behind")
            wait()
        _drop(folder / "save")
        with self._timed("restore"):
            restored = jax.block_until_ready(self.restore(folder / "behind"))
        _drop(folder / "behind")
        require_same(self.name, restored, state)

    def _timed(self, name: str) -> "Clock":
        return Clock(self.seconds[name])


class Clock:
    """Appends the seconds of its `with` block to a list."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds.append(time.perf_counter() - self._start)


def _drop(folder: Path) -> None:
    """Deletes a folder, and waits until the disk has finished."""
    shutil.rmtree(folder)
    os.sync()


def require_same(name: str, restored: Any, state: Any) -> None:
    """Raises DifferentError unless every bit is the same."""
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            same = np.array_equal(np.asarray(x.data), np.asarray(y.data))
            if not same or a.sharding != b.sharding:
                raise DifferentError(f"{name} restored another state")


def ways(target: Any) -> Iterator[Way]:
    """Yields jaxptd's and orbax's ways, for states like `target`."""

    def save(state: Any, folder: Path) -> None:
        Checkpoints(folder, keep=1).save(1, state, description={})

    def save_async(state: Any, folder: Path) -> Callable[[], None]:
        checkpoints = Checkpoints(folder, keep=1)
        checkpoints.save_async(1, state, description={})
        return checkpoints.wait

    yield Way("jaxptd", save, save_async, lambda f: Checkpoints(f, keep=1).restore(1, target))
    yield Way(
        "orbax",
        lambda state, folder: ocp.save(folder.absolute(), state),
        lambda state, folder: ocp.save_async(folder.absolute(), state).result,
        lambda folder: ocp.load(folder.absolute(), target),
    )


def measure(config: Config, folder: Path, *, repeats: int) -> tuple[int, list[Way]]:
    """The bytes of the state, and both ways after so many turns and one that does not count."""
    program = Program(config, make_mesh(config.layout))
    state = jax.block_until_ready(to_canonical(program, program.init_state()))
    found = list(ways(abstract_canonical(program)))
    for number in range(repeats + 1):
        for way in found:
            way.turn(state, folder)
            if number == 0:
                for seconds in way.seconds.values():
                    seconds.clear()
    return sum(x.nbytes for x in jax.tree.leaves(state)), found


HEAD = ["", "jaxptd, s", "jaxptd, MB/s", "orbax, s", "orbax, MB/s", "jaxptd / orbax"]


def section(config: Config, size: int, found: Sequence[Way]) -> str:
    """Makes the table of one layout."""
    rows = [HEAD]
    for name in TIMES:
        medians = [statistics.median(way.seconds[name]) for way in found]
        row = [name]
        for seconds in medians:
            rate = "" if "blocking" in name else f"{size / seconds / 1e6:.0f}"
            row += [f"{seconds:.2f}", rate]
        rows.append([*row, f"**{medians[0] / medians[1]:.2f}**"])
    devices = config.layout.num_devices
    title = f"## {devices} device{'s' if devices > 1 else ''}, layout {config.layout}"
    return f"{title}\n\n{size / 1e9:.2f} GB.\n\n{table(rows)}"


def report(sections: Sequence[str], *, config: Path, repeats: int) -> str:
    """The Markdown page."""
    about = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip()
    head = f"{versions('orbax-checkpoint')} Medians of {repeats} turns of each, one after the other"
    command = f"By `python -m benchmarks.memory.checkpoint`, `{config}`."
    blocks = ["# Checkpoints beside plain orbax", f"{head}.", command, about, *sections]
    return "\n\n".join(blocks) + "\n"


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. Raises UserError."""
    parser = Parser(prog="python -m benchmarks.memory.checkpoint", description=main.__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="whose model is saved")
    parser.add_argument("--repeats", type=int, default=3, help="counted turns (default: 3)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}: measure 1 turn or more")
    if args.folder and not args.folder.is_dir():
        raise UserError(f"--folder {args.folder} is not there; name a folder")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures saving and restoring a model's state beside plain orbax."""
    args = options(argv)
    model = load_config(args.config).model
    configs = [
        Config(model, each, train=TrainConfig(global_batch_size=8, platform="cpu"))
        for each in LAYOUTS
    ]
    prepare(configs[-1])
    sections = []
    for config in configs:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            size, found = measure(config, Path(folder), repeats=args.repeats)
        sections.append(section(config, size, found))
        print(sections[-1], flush=True)
    if args.out:
        write(args.out, report(sections, config=args.config, repeats=args.repeats))
    return 0


if __name__ == "__main__":
    run_command(main)
