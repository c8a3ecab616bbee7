"""`jaxptd doctor`: checks a machine or a cluster, and prints a page for a report."""

import dataclasses
import functools
import inspect
import json
import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jaxptd
from jaxptd import stores
from jaxptd.atomic_files import explained, write_whole
from jaxptd.commands.command_line import load_config
from jaxptd.commands.table import later
from jaxptd.common_options import add_words, check_out, path_option
from jaxptd.config import Config, ProcessesConfig
from jaxptd.config.elastic import for_processes
from jaxptd.config.written import RUN_CONFIG
from jaxptd.distributed.launchers import World, find
from jaxptd.doctor import flags as variables
from jaxptd.doctor import folder as place
from jaxptd.doctor import nvidia, packages, system
from jaxptd.doctor.nvidia import Found
from jaxptd.doctor.page import Page, Row, Verdict, rows_of
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.layout import Layout

FOUND = 1  # exit code
WAIT = 60.0  # seconds for the other processes, unless an option says otherwise


def main(argv: Sequence[str] | None = None) -> int:
    """Checks this machine, or all processes of a run, and prints what stands in the way of a run.

    Exit code 0: no problem; 1: a problem, which the page names with its remedy; 2: bad input.
    """
    return run(read(parser().parse_args(argv)))


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd doctor --quiet     (this machine: only what is wrong)",
        "jaxptd doctor --config gpt2-124m --run-dir /shared/runs/a --out page.md",
        "jaxptd doctor --run-dir /shared/runs/a --links     (under srun: all processes)",
    )
    words = inspect.cleandoc(main.__doc__ or "")
    parser = Parser(prog="jaxptd doctor", description=words, examples=examples)
    help_text = "a config: its layout, processes and size of a checkpoint are checked as well"
    parser.add_argument("--config", metavar="F", help=help_text)
    help_text = "directory of a run, or of one to come: its file system is checked"
    parser.add_argument("--run-dir", type=path_option, metavar="D", help=help_text)
    help_text = "measure a matmul, memory and links on GPUs (a minute or less)"
    parser.add_argument("--links", action="store_true", help=help_text)
    help_text = f"seconds to wait for the other processes of a run; default: {WAIT:g}"
    parser.add_argument("--wait", type=float, metavar="S", default=WAIT, help=help_text)
    help_text = "write the page into a file, which must not exist yet, instead of printing it"
    parser.add_argument("--out", type=path_option, metavar="F", help=help_text)
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    add_words(parser, json="the page", quiet="print problems and notes only, no tables")
    return parser


@dataclasses.dataclass(frozen=True)
class Options:
    """The choices of an examination.

    Args:
        config: of a run. None without one.
        run_dir: its directory or URL. None without one.
        links: whether to measure.
        out: the file to write. None prints the page.
        overwrite: whether it may exist.
        json, quiet: how the page is printed.
        processes: of the run, with the time to wait for them.
    """

    config: Config | None
    run_dir: stores.Place | None
    links: bool
    out: Path | None
    overwrite: bool
    json: bool
    quiet: bool
    processes: ProcessesConfig

    @property
    def layout(self) -> Layout:
        return self.config.layout if self.config else Layout(cp=2)  # as `run.devices.start`


def read(args: Any) -> Options:
    """Checks options.

    Raises:
        UserError: there is no such config, the file cannot be written, or a number is impossible.
    """
    if args.overwrite and args.out is None:
        raise UserError("--overwrite has no effect without --out; name a file")
    if args.out is not None:
        check_out(args.out, overwrite=args.overwrite)
    saved = args.run_dir / RUN_CONFIG if args.run_dir else None
    name = args.config or (saved if saved and os.path.exists(saved) else None)
    config = load_config(name) if name else None
    processes = config.processes if config else ProcessesConfig()
    if not 0 < args.wait < 1e6:
        raise UserError(f"--wait {args.wait:g}: use seconds above 0, a million at most")
    return Options(
        config=config,
        run_dir=args.run_dir or (stores.place(config.train.run_dir) if config else None),
        links=args.links,
        out=args.out,
        overwrite=args.overwrite,
        json=args.json,
        quiet=args.quiet,
        processes=dataclasses.replace(processes, wait=args.wait),
    )


def run(options: Options) -> int:
    """Examines and prints; returns the exit code."""
    examination = Examination(options)
    page = examination.page()
    code = examination.agreed(FOUND if page.has_problem else 0)
    if examination.prints:
        _write(page, options)
    return code


# ---- the checks, in their order ------------------------------------------------------------------


class Examination:
    """One run of all checks.

    Each section is checked apart: one that fails is a row, and the others go on.

    Args:
        options: of the command.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._sections: dict[str, list[Row]] = {}
        self._joined: Any = None  # the exchange among processes, once they have joined

    @property
    def prints(self) -> bool:
        """True in the first process, and in each that could not join."""
        return self._joined is None or self._world.id == 0

    @functools.cached_property
    def _world(self) -> World:
        return find(self._options.processes, os.environ)

    @functools.cached_property
    def _config(self) -> Config | None:
        """The config of a run on as many processes as there are."""
        config = self._options.config
        return config and for_processes(config, self._world.count)

    @property
    def _alone(self) -> bool:
        try:
            return self._world.alone
        except UserError:
            return False

    def page(self) -> Page:
        """Runs all checks."""
        options, gpus = self._options, system.nvidia_gpus()
        versions = packages.versions()
        self._add("system", system.system)
        allowed = packages.ranges()
        self._add("packages", lambda: packages.packages(versions, allowed, gpus=gpus))
        self._add("flags", lambda: variables.flags(os.environ, options.layout, gpus=gpus))
        if options.run_dir:
            self._add("run directory", self._folder)
        driver: list[Row] = []
        if gpus:  # before the processes join: JAX then takes memory of their GPUs
            driver = rows_of("devices", lambda: [*nvidia.driver(nvidia.ask_driver(), versions)])
        wait = 2 * options.processes.wait + 60
        self._add("processes", self._processes, seconds=wait)
        found = self._devices(driver, gpus)
        kinds, on_gpus = found.kinds, found.on_gpus or (not found.devices and gpus > 0)
        self._add("packages", lambda: packages.known_bad(versions, kinds, on_gpus=on_gpus))
        self._add("links", lambda: self._links(found), seconds=600.0)
        if self._joined is not None:
            self._add("processes", lambda: self._compared(versions, found), seconds=600.0)
        title = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, jaxptd {jaxptd.__version__}"
        return Page(title, self._sections)

    def agreed(self, code: int) -> int:
        """The first process's exit code, once they have joined."""
        if self._joined is None:
            return code
        codes = [code]

        def agree() -> list[Row]:
            codes.append(self._joined.agreed(code))
            return []

        self._add("processes", agree)
        return codes[-1]

    def _add(self, section: str, check: Any, **options: Any) -> None:
        rows = rows_of(section, check, **options)
        self._sections.setdefault(section, []).extend(rows)

    def _folder(self) -> list[Row]:
        config, path = self._options.config, self._options.run_dir
        assert path is not None
        if isinstance(path, stores.StorePath):
            return [Row("run directory", f"{path}: not checked, it is in an object store")]
        keep = config.checkpoint.keep + config.checkpoint.keep_best if config else 1
        return place.folder(path, checkpoint=place.checkpoint_bytes(config), keep=keep)

    def _processes(self) -> list[Row]:
        processes, options = later("processes of a doctor"), self._options
        try:
            world, config = self._world, self._config
        except UserError as error:
            remedy = (
                "correct the config or what the launcher sets; without the launcher's variables "
                "this machine is checked alone"
            )
            return [Row("processes", str(error), Verdict.PROBLEM, remedy)]
        rows = processes.launch(world, options.processes, os.environ)
        if world.alone or any(row.verdict is Verdict.PROBLEM for row in rows):
            return rows
        devices = config.layout.num_devices if config else world.count
        row, self._joined = processes.join(world, options.processes, devices=devices)
        return [*rows, row]

    def _devices(self, driver: list[Row], gpus: int) -> Found:
        found = Found()
        joined = self._joined is not None
        world = self._world if joined else World()

        def check() -> list[Row]:
            config = self._config if joined or self._alone else None
            rows: list[Row] = later("devices of a doctor").devices(config, world, found, gpus=gpus)
            return rows

        self._add("devices", lambda: driver)
        self._add("devices", check)
        return found

    def _links(self, found: Found) -> list[Row]:
        if not found.on_gpus:
            why = "there is no accelerator" if found.devices else "no devices have started"
            return [Row("links", f"not measured: {why}")]
        if not self._options.links:
            return [Row("links", "not measured: add --links (a minute or less)")]
        rows: list[Row] = later("links of a doctor").links(found.devices)
        return rows

    def _compared(self, versions: dict[str, str], found: Found) -> list[Row]:
        processes = later("processes of a doctor")
        exchange, sections = self._joined, self._sections.items()
        folder = self._options.run_dir
        problems = [
            [section, row.name, row.finding, row.remedy]
            for section, rows in sections
            for row in rows
            if row.verdict is Verdict.PROBLEM
        ]
        sees = exchange.seen(place.nearest(folder) if isinstance(folder, Path) else None)
        facts = processes.Facts(socket.gethostname(), versions, found.counts, sees, problems)
        gathered, clocks = exchange.gather(facts), exchange.clocks()
        return processes.compared(gathered, clocks) if clocks else []


# ---- the page ------------------------------------------------------------------------------------


def _write(page: Page, options: Options) -> None:
    """Prints the page, or writes it and prints what it amounts to."""
    text = page.worst() if options.quiet else page.markdown()
    if options.json:
        text = json.dumps(page.as_dict(), indent=1 if options.out else None)
    if options.out is None:
        print(text)
        return
    explain = f"--out {options.out}"
    files = {options.out: f"{text}\n".encode()}
    write_whole(files, lambda _: explained(explain, "name a file in a writable folder"))
    print(f"wrote {options.out}: {page.summary()}")


if __name__ == "__main__":
    run_command(main)
