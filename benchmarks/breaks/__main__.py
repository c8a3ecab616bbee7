"""Breaks the code on purpose, one place at a time, and checks that the tests notice.

`python -m benchmarks.breaks [--only ring ...] [--jobs 2]`

Each row of the tables beside this file replaces one piece of text of the package (a sum is dropped,
a ring reversed, a scale doubled) in a copy of the repository, runs the tests that the row names,
and expects one to fail. Ends with exit code 1 if a break goes unnoticed. A row whose text is no
longer in the code, or is there twice, is an error: correct the table when the code changes.
"""

import concurrent.futures
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.breaks.attention import ATTENTION
from benchmarks.breaks.data import DATA, DRAWN
from benchmarks.breaks.encoder_decoders import ENCODER_DECODERS
from benchmarks.breaks.hugging_face import HUGGING_FACE, SCORES
from benchmarks.breaks.kernels import KERNELS
from benchmarks.breaks.models import MODELS
from benchmarks.breaks.peak import PEAK
from benchmarks.breaks.planner import PLANNER
from benchmarks.breaks.plans import PAPERS, PLANS
from benchmarks.breaks.reference import REFERENCE
from benchmarks.breaks.stacks import IMAGES, STACKS
from benchmarks.breaks.table import BREAKS, Break
from benchmarks.breaks.training import TRAINING
from jaxptd.analysis.report import table
from jaxptd.errors import Parser, UserError, run_command

ROOT = Path(__file__).parents[2]
ALL = (
    *BREAKS,
    *ATTENTION,
    *MODELS,
    *TRAINING,
    *KERNELS,
    *STACKS,
    *IMAGES,
    *ENCODER_DECODERS,
    *DATA,
    *HUGGING_FACE,
    *SCORES,
    *PEAK,
    *PLANNER,
    *PLANS,
    *PAPERS,
    *REFERENCE,
    *DRAWN,
)
FAILED = 1  # pytest's exit code if tests failed


def broken(text: str, row: Break) -> str:
    """Returns the file's text with the break.

    Raises:
        UserError: the text to replace is not there exactly once.
    """
    if text.count(row.old) != 1:
        found = text.count(row.old)
        raise UserError(f"{row.name}: {row.file} has {row.old!r} {found} times; correct the table")
    return text.replace(row.old, row.new)


def copy_repository(target: Path) -> None:
    """Copies the files that git tracks, and links the cache of compiled programs."""
    cache = ROOT / ".jax_cache"
    cache.mkdir(exist_ok=True)
    (target / cache.name).symlink_to(cache)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.splitlines():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


@contextlib.contextmanager
def broken_copy(row: Break | None) -> Iterator[Path]:
    """Yields the folder of a copy of the repository with a break; None: as it is."""
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        if row is not None:
            path = Path(folder) / row.file
            path.write_text(broken(path.read_text(), row))
        yield Path(folder)


def pytest_command(row: Break, marks: str = "not gpu") -> list[str]:
    """The command that runs a break's tests, slow ones too, until one fails.

    marks: which of them, by pytest's `-m`.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-m", marks]
    command += row.tests.split()
    return command + (["-k", row.select] if row.select else [])


def outcome(row: Break) -> tuple[str, float]:
    """Runs a break: `caught`, `NOT caught` or `no result`, and seconds."""
    begin = time.perf_counter()
    with broken_copy(row) as folder:
        done = subprocess.run(
            pytest_command(row), cwd=folder, capture_output=True, text=True, check=False
        )
    word = {0: "NOT caught", FAILED: "caught"}.get(done.returncode)
    return word or f"no result: {done.stdout[-200:]}", time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> int:
    """Breaks the code in one place at a time and runs the tests that should notice."""
    parser = Parser(prog="python -m benchmarks.breaks", description=main.__doc__)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time")
    options = parser.parse_args(argv)
    rows = [row for row in ALL if options.only in row.name]
    for row in rows:
        broken((ROOT / row.file).read_text(), row)  # before anything runs
    cells = [["break", "file", "tests", "s"]]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for row, (word, seconds) in zip(rows, pool.map(outcome, rows), strict=True):
            print(f"{word:11} {seconds:4.0f} s  {row.name}", flush=True)
            cells.append([row.name, row.file, word, f"{seconds:.0f}"])
    print(table(cells))
    return int(any(cell[2] != "caught" for cell in cells[1:]))


if __name__ == "__main__":
    run_command(main)
