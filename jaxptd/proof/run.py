"""`jaxptd verify --random N`: draws cases, compares each with one device, and prints a table."""

import collections
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import jaxptd
from jaxptd.common_options import as_path
from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.proof.compare import Comparer, Ending, command_line
from jaxptd.proof.draw import Case, Draws, Share, general, run_in_processes, try_made
from jaxptd.proof.values import DRAWN, Values, plain
from jaxptd.run.devices import simulate

# ---- the record: JSON lines, which repeating the command continues -------------------------------

FILE = "cases.jsonl"


class Record:
    """The compared cases, by number; a case that began and never ended has crashed.

    Args:
        folder: of the file; created if missing.
        about: seed and devices.

    Raises:
        UserError: the folder has a record of other cases, or cannot be written.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._path = folder / FILE
        self.about = {**about, "jax": jax.__version__}
        self.lines: dict[int, dict[str, Any]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            texts = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot use {self._path}: {error}; name another folder") from error
        records = [line for line in map(_read, texts) if line]
        if not records:
            self._add(self.about)
        elif records[0] != self.about:
            raise UserError(
                f"{self._path} has other cases, {_words(records[0])}, not {_words(self.about)}; "
                "name another folder with --out"
            )
        for line in records[1:]:
            self.lines[line["case"]] = line

    def begin(self, number: int) -> None:
        """Records that a case begins; it has crashed unless `end` follows."""
        words = "the process ended during this case"
        self._put({"case": number, "outcome": "crashed", "words": words})

    def end(self, line: Mapping[str, Any]) -> None:
        """Records how a case ended."""
        self._put(dict(line))

    def _put(self, line: dict[str, Any]) -> None:
        self.lines[line["case"]] = line
        self._add(line)

    def _add(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _read(text: str) -> dict[str, Any] | None:
    """A parsed line; None for one that was cut off."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _words(about: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in about.items())


# ---- reduces a failing case to the fewest fields without plain values ----------------------------

MOST = 80  # comparisons


def minimised(
    values: Values, folder: Path, compare: Callable[[Config], Ending]
) -> tuple[Values, Config]:
    """Sets fields to their plain values, one by one, as long as the outcome stays the same.

    Args:
        values: of a case that crashes or is unequal.
        folder: for schedule tables.
        compare: compares a config with one device.

    Returns:
        the remaining values, and their config.
    """
    config = try_made(values, folder)
    assert isinstance(config, Config)
    wanted, left, changed = compare(config).outcome, MOST, True
    while changed and left > 0:
        changed = False
        for name in DRAWN:
            fewer = {**values, name: plain(name)}
            if fewer == values or left <= 0:
                continue
            smaller = try_made(fewer, folder)
            if isinstance(smaller, str):
                continue
            left -= 1
            if compare(smaller).outcome == wanted:
                values, config, changed = fewer, smaller, True
    return values, config


# ---- running cases -------------------------------------------------------------------------------

OUTCOMES = ("equal", "refused", "crashed", "unequal")
FAILED = ("crashed", "unequal")
DEVICES = (8, 16)
MOST_MINIMISED = 5
SENTENCES = 15  # most refusals in the table
WHOLE = Share()


def add_options(parser: Any) -> None:
    """Adds the options of `--random` to a parser."""
    options: tuple[tuple[str, type, Any, str, str], ...] = (
        ("random", int, None, "N", "draw N random configs from all options and verify each"),
        ("seed", int, None, "S", "with --random: seed of the configs"),
        ("devices", int, None, "N", "with --random: 8 or 16 simulated devices"),
        ("minutes", float, None, "M", "with --random: start no case after M minutes"),
        ("case", int, None, "K", "with --random: only case K, from 0"),
        ("jobs", int, None, "K", "with --random: use K processes"),
        ("out", str, None, "D", "with --random: folder of the record, which later runs continue"),
    )
    for name, kind, default, metavar, text in options:
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)


def run_random(config: Config, options: Mapping[str, Any]) -> int:
    """Draws and verifies cases; exit code 0 if none crashed or was unequal, else 1."""
    options = {
        **options,
        "seed": options["seed"] or 0,
        "devices": options["devices"] or DEVICES[0],
        "jobs": 1 if options["jobs"] is None else options["jobs"],
    }
    _check(config, options)
    default = "runs/verify-random-{seed}-{devices}".format(**options)
    folder = as_path(options["out"] or default, "--out")
    draws, record = _begin(options, folder)
    ended: list[int] = []
    if options["jobs"] > 1:
        ended = run_in_processes(_compare_share, options["jobs"], options, folder)
        draws, record = _begin(options, folder)
        whole = (number for number in itertools.count() if number not in record.lines)
        options = {**options, "random": min(options["random"], next(whole))}
    refusals = _run(draws, record, folder / "schedules", options)
    result = _result(draws, record, refusals)
    if options["json"]:
        print(json.dumps(result))
    else:
        _print(result, quiet=options["quiet"])
    for number, code in enumerate(ended):
        if code:
            _stderr().print(f"process {number} ended early, with {code}; repeat the command")
    return int(any(ended) or any(result["outcomes"][name] for name in FAILED))


def _begin(options: Mapping[str, Any], folder: Path) -> tuple[Draws, Record]:
    """The cases from the first on, and their record."""
    seed, devices = options["seed"], options["devices"]
    simulate(devices)
    about = {"seed": seed, "devices": devices, "jaxptd": jaxptd.__version__}
    return Draws(seed, devices, folder / "schedules"), Record(folder, about)


def _compare_share(share: Share, options: Mapping[str, Any], folder: Path) -> None:
    """Compares the cases of a share, in its own process."""
    with contextlib.suppress(KeyboardInterrupt):  # the parent process reports it
        _run(*_begin(options, folder), folder / "schedules", {**options, "quiet": True}, share)


def refuse_without_random(options: Mapping[str, Any]) -> None:
    """Raises UserError for options that only `--random` reads."""
    for name in ("seed", "devices", "minutes", "case", "jobs", "out"):
        if options[name] is not None:
            raise UserError(f"--{name} has no effect without --random; add it")


def _check(config: Config, options: Mapping[str, Any]) -> None:
    """Raises UserError for impossible options, before anything is drawn."""
    if config != Config():
        raise UserError("--random draws every field; leave --config, --run-dir and fields out")
    if options["random"] < 1:
        raise UserError(f"--random {options['random']}: use 1 or more")
    if options["devices"] not in DEVICES:
        raise UserError(f"--devices {options['devices']}: use 8 or 16")
    if options["minutes"] is not None and not options["minutes"] > 0:
        raise UserError(f"--minutes {options['minutes']:g}: use a number above 0")
    if options["case"] is not None and not 0 <= options["case"] < options["random"]:
        raise UserError(f"--case {options['case']}: use 0 to {options['random'] - 1}")
    if options["jobs"] < 1:
        raise UserError(f"--jobs {options['jobs']}: use 1 or more")
    if options["jobs"] > 1 and options["case"] is not None:
        raise UserError("--jobs has no effect with --case; leave it out")


def _run(
    draws: Draws,
    record: Record,
    folder: Path,
    options: Mapping[str, Any],
    share: Share = WHOLE,
) -> collections.Counter[str]:
    """Compares the cases of a share that the record lacks; counts the refusals of all."""
    begun, comparer, only = time.monotonic(), Comparer(), options["case"]
    refusals: collections.Counter[str] = collections.Counter()
    hidden = options["quiet"] or options["json"]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), disable=hidden, console=_stderr()) as progress:
        task = progress.add_task("drawing", total=options["random"])
        for case in itertools.islice(draws, options["random"]):
            refusals.update({general(sentence) for sentence in case.refused})
            new = case.number not in record.lines if only is None else case.number == only
            if new and share.has(case.number):
                progress.update(task, description=f"{case.number}: {case.config.layout}"[:60])
                _compare(case, record, comparer, folder)
            progress.advance(task)
            late = options["minutes"] and time.monotonic() - begun > 60 * options["minutes"]
            if late or case.number == only:
                break
    return refusals


def _compare(case: Case, record: Record, comparer: Comparer, folder: Path) -> None:
    record.begin(case.number)
    begun = time.monotonic()
    ending = comparer.compare(case.config)
    line = {
        "case": case.number,
        "outcome": ending.outcome,
        "dtype": case.config.model.dtype,
        "worst": ending.worst,
        "words": ending.words,
        "seconds": round(time.monotonic() - begun, 2),
    }
    failures = [each for each in record.lines.values() if "smallest" in each]
    if ending.outcome in FAILED:
        line |= {"values": dict(case.values), "smallest": command_line(case.config)}
        if len(failures) < MOST_MINIMISED:
            record.end(line)  # recorded now, in case the process ends while minimising
            _, smallest = minimised(case.values, folder, comparer.compare)
            line["smallest"] = command_line(smallest)
    record.end(line)


def _result(draws: Draws, record: Record, refusals: collections.Counter[str]) -> dict[str, Any]:
    """Everything to print."""
    lines = list(record.lines.values())
    counts = collections.Counter(line["outcome"] for line in lines)
    worst: dict[str, float] = {}
    for line in lines:
        if line["outcome"] == "equal":
            worst[line["dtype"]] = max(worst.get(line["dtype"], 0.0), line["worst"])
    return {
        **record.about,
        "outcomes": {name: counts[name] for name in OUTCOMES},
        "worst": dict(sorted(worst.items())),
        "pairs": draws.pairs.counts(),
        "refused": dict(refusals.most_common()),
        "failures": [line for line in lines if line["outcome"] in FAILED],
    }


def _stderr() -> Console:
    return Console(stderr=True)


def _print(result: Mapping[str, Any], *, quiet: bool) -> None:
    console = Console(highlight=False)
    about = f"seed {result['seed']}, {result['devices']} devices"
    counts = result["outcomes"]
    if not quiet:
        table = Table("cases", "", title=f"drawn with {about}")
        for name, number in counts.items():
            table.add_row(name, str(number))
        for dtype, error in result["worst"].items():
            table.add_row(f"worst gradient among the equal, {dtype}", f"{error:.1e}")
        pairs = result["pairs"]
        table.add_row("pairs of values that met", f"{pairs['met']} of {pairs['of']}")
        table.add_row("other pairs, without any valid config", str(pairs["refused"]))
        console.print(table)
        refused = Table("cases", "configs refused on the way", title="refused")
        for sentence, number in itertools.islice(result["refused"].items(), SENTENCES):
            refused.add_row(str(number), sentence)
        console.print(refused)
    for line in result["failures"]:
        console.print(f"case {line['case']} {line['outcome']}: {line['words']}", markup=False)
        if "smallest" in line:
            console.print(f"  {line['smallest']}", markup=False, soft_wrap=True)
            again = f"--random {line['case'] + 1} --case {line['case']} --seed {result['seed']}"
            console.print(f"  as drawn: jaxptd verify {again} --devices {result['devices']}")
    words = ", ".join(f"{number} {name}" for name, number in counts.items())
    failed = any(counts[name] for name in FAILED)
    console.print(f"{about}: {words}", style="bold red" if failed else "green")
