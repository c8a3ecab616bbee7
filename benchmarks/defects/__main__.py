"""Puts known defects into the code, one at a time, and records which detectors find them.

`python -m benchmarks.defects --list | --run [NAME ...] | --json | --control`

The rows are in `rows/`: each replaces one line of meaning, as a missing sum or a ring that is
turned, in a copy of the repository. The detectors: tracing (`check_vma` raises), `verify`, `comms`
(bytes that differ from the formula), the independent reference, and the tests that the row names,
the default ones and then, for what those do not find, the slow ones.
Findings are kept as they come; a later run goes on with what is missing, or whose code or tests
changed.
`--control` lets tracing, `verify` and `comms` look at every case without a defect.
"""

import concurrent.futures
import json
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.breaks.__main__ import ROOT, broken
from benchmarks.defects import detectors, page
from benchmarks.defects.detectors import DETECTORS
from benchmarks.defects.results import Results, caught_by, write_text
from benchmarks.defects.rows import ALL
from benchmarks.defects.table import Defect
from jaxptd.analysis.report import table
from jaxptd.errors import Parser, UserError, run_command

RESULTS = ROOT / "benchmarks" / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Injects known defects one at a time and records which detectors find them."""
    options = _parser().parse_args(argv)
    results = Results(options.results / "defects.json")
    chosen = _chosen(options.run or ())
    if options.run is not None:
        _run(chosen, results, options)
        write_text(options.results / "defects.md", page.page(ALL, results))
        print(page.headline(ALL, results))
        return int(any(not caught_by(results.of(each)) for each in chosen))
    if options.control:
        return _control(sorted({case for each in chosen for case in each.cases}), options.jobs)
    if options.json:
        rows = {each.name: {**_described(each), "found": results.of(each)} for each in chosen}
        print(json.dumps(rows))
    else:
        print(table([["defect", "kind", "file", "where"], *map(_listed, chosen)]))
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m benchmarks.defects", description=main.__doc__)
    parser.add_argument("--list", action="store_true", help="print the defects; the default")
    words = "run the detectors of these defects, or those whose name contains it; default: all"
    parser.add_argument("--run", nargs="*", metavar="NAME", help=words)
    parser.add_argument("--json", action="store_true", help="print defects and findings")
    words = "look at every case without a defect, where nothing may be found"
    parser.add_argument("--control", action="store_true", help=words)
    parser.add_argument("--jobs", type=int, default=1, help="defects at a time")
    words = f"names with commas between: {','.join(DETECTORS)}"
    parser.add_argument("--detectors", default=",".join(DETECTORS), help=words)
    words = "folder of defects.json and defects.md"
    parser.add_argument("--results", type=Path, default=RESULTS, help=words)
    return parser


def _chosen(names: Collection[str]) -> list[Defect]:
    found = [each for each in ALL if not names or any(name in each.name for name in names)]
    if not found:
        raise UserError(f"no defect is named {' or '.join(names)}; see --list")
    for each in found:
        broken((ROOT / each.patch.file).read_text(), each.patch)  # before anything runs
    return found


def _run(chosen: Sequence[Defect], results: Results, options: object) -> None:
    names = options.detectors.split(",")  # type: ignore[attr-defined]
    if unknown := [name for name in names if name not in DETECTORS]:
        raise UserError(f"no detector is named {unknown[0]}; use {', '.join(DETECTORS)}")

    def one(defect: Defect) -> None:
        missing = results.missing(defect, names)
        if not missing:
            return
        results.add(defect, detectors.run(defect, missing))
        found = results.of(defect)
        words = " ".join(f"{name} {found[name]['word']}," for name in missing).rstrip(",")
        print(f"{defect.name}: {words}", flush=True)

    results.keep(ALL)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:  # type: ignore[attr-defined]
        list(pool.map(one, chosen))


def _control(cases: Sequence[str], jobs: int) -> int:
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda case: detectors.probe((case,), ROOT), cases))
    wrong = [
        f"{case}: {name} finds {each['found']}"
        for case, findings in zip(cases, found, strict=True)
        for name, each in findings.items()
        if each["found"]
    ]
    print("\n".join(wrong or [f"nothing is found in {len(cases)} cases without a defect"]))
    return int(bool(wrong))


def _described(defect: Defect) -> dict[str, object]:
    patch = defect.patch._asdict()
    more = {"kind": defect.kind, "cases": defect.cases, "where": defect.reach}
    return {**patch, **more, "explained": defect.explained}


def _listed(defect: Defect) -> list[str]:
    return [defect.name, defect.kind.value, defect.patch.file, page.WHERE[defect.reach]]


if __name__ == "__main__":
    run_command(main)
