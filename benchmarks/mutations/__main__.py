"""Injects known bugs into the code, one at a time, and records who notices.

`python -m benchmarks.mutations --list | --run [NAME ...] | --json | --control`

Each row in `rows/` changes one meaningful line in a copy of the repository, for example by dropping
a sum or reversing a ring. The detectors are tracing (`check_vma` raises), `verify`, `comms` (bytes
differ from the formula), the independent reference, and the tests that the row names: first the
default ones, then the slow ones for what those miss. If a row makes no step wrong, or exists only
for its tests, only its tests look for it.
Findings are saved as they come. A later run continues with those that are missing or whose row,
function or tests have changed. The exit code is 1 if a bug that was run goes unnoticed.
`--control` lets tracing, `verify` and `comms` look at every case without a bug.
"""

import concurrent.futures
import json
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.lib.pages import RESULTS, write
from benchmarks.mutations import detectors, page
from benchmarks.mutations.detectors import DETECTORS, TESTED
from benchmarks.mutations.results import Results, caught_by, detectors_of
from benchmarks.mutations.table import ROOT, Mutation, mutations
from jaxptd.analysis.report import table
from jaxptd.errors import Parser, UserError, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Injects known bugs into the code, one at a time, and records who notices."""
    options = _parser().parse_args(argv)
    names = [*TESTED] if options.tests else options.detectors.split(",")
    if unknown := [name for name in names if name not in DETECTORS]:
        raise UserError(f"no detector is named {unknown[0]}; use {', '.join(DETECTORS)}")
    results = Results(options.results / "mutations.json")
    chosen = _chosen(options.run or ())
    if options.run is not None:
        _run(chosen, results, names, options.jobs)
        write(options.results / "mutations.md", page.page(mutations(), results))
        asked = [each for each in chosen if {*names} & {*detectors_of(each)}]
        unnoticed = [each.name for each in asked if not caught_by(results.of(each), names)]
        print("\n".join([f"{name}: NOT noticed" for name in unnoticed]), end="\n" * bool(unnoticed))
        print(f"{len(asked) - len(unnoticed)} of {len(asked)} are noticed by {', '.join(names)}")
        return int(bool(unnoticed))
    if options.control:
        return _control(sorted({case for each in chosen for case in each.cases}), options.jobs)
    if options.json:
        print(json.dumps([{**each._asdict(), "found": results.of(each)} for each in chosen]))
    else:
        print(table([["mutation", "kind", "file", "where"], *map(_listed, chosen)]))
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m benchmarks.mutations", description=main.__doc__)
    parser.add_argument("--list", action="store_true", help="print the mutations (default)")
    words = "run those whose name is or contains one of these (default: all)"
    parser.add_argument("--run", nargs="*", metavar="NAME", help=words)
    parser.add_argument("--json", action="store_true", help="print mutations and findings as JSON")
    words = "look at every case without a bug, where nothing may be found"
    parser.add_argument("--control", action="store_true", help=words)
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    words = f"names separated by commas: {','.join(DETECTORS)}"
    parser.add_argument("--detectors", default=",".join(DETECTORS), help=words)
    words = f"the same as --detectors {','.join(TESTED)}"
    parser.add_argument("--tests", action="store_true", help=words)
    words = "folder of mutations.json and mutations.md"
    parser.add_argument("--results", type=Path, default=RESULTS, help=words)
    return parser


def _chosen(names: Collection[str]) -> list[Mutation]:
    found = [each for each in mutations() if not names or any(name in each.name for name in names)]
    if not found:
        raise UserError(f"no mutation is named {' or '.join(names)}; see --list")
    for each in found:
        each.made((ROOT / each.file).read_text())  # before anything runs
    return found


def _run(chosen: Sequence[Mutation], results: Results, names: Sequence[str], jobs: int) -> None:
    def one(row: Mutation) -> None:
        missing = results.missing(row, names)
        if not missing:
            return
        results.add(row, detectors.run(row, missing))
        found = results.of(row)
        words = " ".join(f"{name} {found[name]['word']}," for name in missing).rstrip(",")
        print(f"{row.name}: {words}", flush=True)

    results.keep(mutations())
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
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
    print("\n".join(wrong or [f"nothing is found in {len(cases)} cases without a bug"]))
    return int(bool(wrong))


def _listed(row: Mutation) -> list[str]:
    kind = row.kind.value if row.kind else "for its tests"
    return [row.name, kind, row.file, page.WHERE[row.reach] if row.kind else ""]


if __name__ == "__main__":
    run_command(main)
