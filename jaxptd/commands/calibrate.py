"""`jaxptd plan calibrate`: times kernels and collectives here, and writes the hardware file."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from jaxptd.atomic_files import explained, write_whole
from jaxptd.calibration.report import MEASURED, CalibrationReport, Timed
from jaxptd.calibration.suite import ACCELERATOR, CPU, Attention, Sample, suite
from jaxptd.calibration.timer import Timer, attention_model, find_machine, table_name
from jaxptd.common_options import add_words, check_out, path_option
from jaxptd.config import ProcessesConfig
from jaxptd.distributed import coordination
from jaxptd.distributed.launchers import find
from jaxptd.errors import Parser, UserError, did_you_mean, quoted
from jaxptd.hardware import Figure
from jaxptd.hardware.table import PACKAGED, read_figures
from jaxptd.run import devices

SECONDS = 150.0  # that samples may take by default
LONGEST = 3600.0
NAME = re.compile(r"[A-Za-z][\w.-]{0,63}")
OUT_OF_TIME = "out of time"


@dataclasses.dataclass(frozen=True)
class Options:
    """The choices of a calibration.

    Args:
        out: the file to write.
        name: the accelerator's name in that file.
        gpu: the accelerator whose limits the shares refer to. None asks the device.
        figures: the numbers of every known accelerator, by name.
        seconds: time budget; no sample starts after it.
        overwrite: whether `out` may exist.
        json, quiet: how the result is printed.
    """

    out: Path
    name: str
    gpu: str | None
    figures: Mapping[str, Mapping[str, Figure]]
    seconds: float
    overwrite: bool
    json: bool
    quiet: bool


class Times(Protocol):
    """Times samples, such as `Timer`."""

    def __call__(self, sample: Sample) -> tuple[float, ...]: ...

    def agreed(self, value: str) -> str: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Times kernels and collectives on this machine, and writes its hardware file."""
    return run(read(parser().parse_args(argv)))


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd plan calibrate --out cluster.yaml",
        "jaxptd plan calibrate --out cluster.yaml --gpu h200 --name mynode",
    )
    parser = Parser(prog="jaxptd plan calibrate", description=main.__doc__, examples=examples)
    help_text = "the hardware file to write; must not exist yet"
    parser.add_argument("--out", type=path_option, metavar="F", help=help_text)
    help_text = "the accelerator's name in that file; default: the file's"
    parser.add_argument("--name", metavar="N", help=help_text)
    help_text = "the accelerator whose limits to start from; default: found from the device"
    parser.add_argument("--gpu", metavar="G", help=help_text)
    help_text = "a YAML file of accelerators, in addition to the packaged ones"
    parser.add_argument("--hardware", type=path_option, metavar="F", help=help_text)
    help_text = f"time budget: no program starts after this many seconds; default: {SECONDS:g}"
    parser.add_argument("--seconds", type=float, metavar="S", help=help_text)
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    add_words(parser, json="shares and times", quiet="print the shares only, no progress")
    return parser


def read(args: Any) -> Options:
    """Checks the options of a calibration.

    Raises:
        UserError: an option is wrong, or the file exists or cannot be written.
    """
    if args.out is None:
        raise UserError("--out is required: the hardware file to write, such as --out cluster.yaml")
    seconds = SECONDS if args.seconds is None else args.seconds
    if not 0 < seconds <= LONGEST:
        raise UserError(f"--seconds {seconds:g}: use more than 0 and at most {LONGEST:g}")
    figures = {**read_figures(PACKAGED), **(read_figures(args.hardware) if args.hardware else {})}
    if args.gpu is not None and args.gpu not in figures:
        remedy = did_you_mean(args.gpu, figures, otherwise=f"use one of {', '.join(figures)}")
        raise UserError(f"--gpu {quoted(args.gpu)}: no such accelerator; {remedy}")
    check_out(args.out, overwrite=args.overwrite)
    name = args.out.stem if args.name is None else args.name
    if not NAME.fullmatch(name):
        raise UserError(
            f"--name {quoted(repr(name))}: use letters, digits, '.', '-' and '_', a letter first, "
            "at most 64"
        )
    return Options(
        args.out, name, args.gpu, figures, seconds, args.overwrite, args.json, args.quiet
    )


def run(options: Options) -> int:
    """Times this machine and writes its hardware file.

    Raises:
        UserError: the devices do not start or are not in the table, or nothing was measured.
    """
    deadline = time.monotonic() + options.seconds
    world = find(ProcessesConfig(), os.environ)
    coordination.join(world, ProcessesConfig(), devices=world.count)
    started = devices.start()
    report = calibrate(started, options, deadline=deadline)
    if coordination.is_first():
        _write(report, options)
        _print(report, options)
    return 0


def calibrate(devices: Sequence[Any], options: Options, *, deadline: float) -> CalibrationReport:
    """Times samples on devices until the deadline.

    Args:
        devices: the devices to time.
        options: the command's options.
        deadline: in seconds of `time.monotonic()`.

    Raises:
        UserError: the devices are not in the table, or nothing was measured.
    """
    simulated = devices[0].platform == "cpu"
    base = options.gpu or table_name(devices[0].device_kind, options.figures)
    figures = _with_multiprocessors(options.figures[base], devices[0])
    machine = find_machine(devices, fp8=figures["fp8_flops"].value > 0)
    sizes = CPU if simulated else ACCELERATOR
    samples = suite(machine, sizes)
    show = _silent if options.quiet or not coordination.is_first() else _progress()
    timed, left = measure(samples, Timer(devices), deadline=deadline, show=show)
    report = CalibrationReport(
        name=options.name,
        base=base,
        figures=figures,
        machine=machine,
        where=_where(devices),
        simulated=simulated,
        timed=timed,
        left=left,
        attention=attention_model(Attention(*sizes.attention[0]), devices[0]).attention,
    )
    if not report.shares:
        reason = left[0][1] if left else "times are too short"
        raise UserError(
            f"--seconds {options.seconds:g}: nothing was measured ({quoted(reason)}); give more"
        )
    return report


def measure(
    samples: Sequence[Sample], timer: Times, *, deadline: float, show: Callable[[str], None]
) -> tuple[list[Timed], list[tuple[Sample, str]]]:
    """Times samples until the deadline; also returns those it did not time, with the reason."""
    timed: list[Timed] = []
    left: list[tuple[Sample, str]] = []
    for number, sample in enumerate(samples, start=1):
        if timer.agreed(OUT_OF_TIME if time.monotonic() >= deadline else ""):
            left += [(sample, OUT_OF_TIME) for sample in samples[number - 1 :]]
            break
        show(f"{number} of {len(samples)}: {sample}")
        try:
            timed.append(Timed(sample, timer(sample)))
        except RuntimeError as error:  # from XLA: out of memory, or a kernel that this device lacks
            left.append((sample, quoted(" ".join(str(error).split()))))
    show("")
    return timed, left


def _with_multiprocessors(figures: Mapping[str, Figure], device: Any) -> dict[str, Figure]:
    """The numbers, with the device's own count of multiprocessors where it reports one."""
    count = getattr(device, "core_count", None)
    if not count or device.platform == "cpu":
        return dict(figures)
    return {**figures, "multiprocessors": Figure(int(count), MEASURED, "reported by the device")}


def _where(devices: Sequence[Any]) -> str:
    """Date, devices and versions."""
    simulated = devices[0].platform == "cpu"
    kind = "simulated CPU devices" if simulated else f"x {quoted(devices[0].device_kind)}"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    return f"{datetime.now(UTC):%Y-%m-%d}, {len(devices)} {kind}, {versions}"


def _write(report: CalibrationReport, options: Options) -> None:
    check_out(options.out, overwrite=options.overwrite)
    explain = f"--out {options.out}"
    files = {options.out: report.yaml().encode()}
    write_whole(files, lambda _: explained(explain, "name a file in a writable folder"))


def _print(report: CalibrationReport, options: Options) -> None:
    if options.json:
        print(json.dumps({"out": str(options.out), **report.as_dict()}))
        return
    shares, times = report.tables()
    if not options.quiet:
        print(times)
    print(shares)
    for sample, reason in report.left:
        if reason != OUT_OF_TIME and not options.quiet:
            print(f"not timed: {sample}: {reason}")
    if not options.quiet:
        print(f"wrote {options.out}; use it with --hardware {options.out}")


def _silent(_: str) -> None:
    """Shows nothing."""


def _progress() -> Callable[[str], None]:
    """Shows lines on stderr: on a terminal one, rewritten, else one every 10 s; "" ends it."""
    tty = sys.stderr.isatty()
    shown = -10.0

    def show(line: str) -> None:
        nonlocal shown
        now = time.monotonic()
        if (not tty and (not line or now - shown < 10)) or (not line and shown < 0):
            return
        shown = now
        with contextlib.suppress(OSError):
            print(f"{line:<78}"[:78], end="\r" if tty and line else "\n", file=sys.stderr)
            sys.stderr.flush()

    return show
