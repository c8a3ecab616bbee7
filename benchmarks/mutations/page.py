"""Writes the page of results: rates, kinds, what verify misses, and every mutation."""

from collections.abc import Collection, Sequence
from importlib.metadata import version

from benchmarks.mutations.detectors import CAUGHT, DETECTORS, NOT_RUN, TESTED
from benchmarks.mutations.results import (
    Results,
    caught_by,
    is_step,
    kinds,
    ran,
    rates,
    survivors,
)
from benchmarks.mutations.table import Mutation, Reach
from jaxptd.analysis.report import table

WHERE = {
    Reach.LAYOUT: "a layout differs from one device",
    Reach.BOTH: "one device is wrong as well",
    Reach.RUN: "no step is wrong",
}


def page(mutations: Collection[Mutation], results: Results) -> str:
    """The page as Markdown."""
    rows = [each for each in mutations if each.kind]
    tested = [each for each in mutations if not each.kind]
    parts = [
        "# Mutations",
        f"`python -m benchmarks.mutations --run`, jax {version('jax')}, simulated devices.",
        "A mutation changes one meaningful line in a copy of the repository. Each detector runs in "
        "its own process (tracing, verify and comms share one); seconds are the time to its "
        "verdict, including imports. A dash means not run: what cannot be traced cannot run, and "
        "slow tests look only for what the default ones miss. "
        "`verify` runs in float64 first, on the tiny config, with compiled programs cached.",
        "## Rates\n\n" + table(rates(rows, results)) + "\n\n" + headline(rows, results),
        "## Kinds\n\nMutations caught by each detector.\n\n" + table(kinds(rows, results)),
        "## What neither tracing nor verify catches\n\n" + _survivors(rows, results),
        "## Every mutation that all detectors look for\n\n" + _every(rows, results),
        "## Mutations that only tests look for\n\n" + _tested(tested, results),
    ]
    return "\n\n".join(parts) + "\n"


def headline(rows: Collection[Mutation], results: Results) -> str:
    """The published shares, in sentences."""
    steps = [each for each in rows if is_step(each)]
    spread = [each for each in steps if each.reach is Reach.LAYOUT]
    every = [each for each in rows if not each.explained]
    lines = [
        _shares("change what a step of a layout computes", spread, results),
        _shares("change what a step computes, anywhere", steps, results),
        _shares("change anything", every, results),
    ]
    explained = [each for each in rows if each.explained]
    lines.append(
        f"{len(explained)} change no result, for the reasons given below; "
        f"comms catches {sum('comms' in caught_by(results.of(each)) for each in explained)} of "
        "them by their bytes."
    )
    return "\n".join(f"- {line}" for line in lines)


def _shares(words: str, rows: Sequence[Mutation], results: Results) -> str:
    said = [
        f"{who} {_share(rows, results, detectors)}"
        for who, detectors in (
            ("tracing or verify catches", ("tracing", "verify")),
            ("the default tests catch", ("default",)),
            ("any detector", DETECTORS),
        )
    ]
    return f"{len(rows)} {words}: {', '.join(said)}."


def _share(rows: Sequence[Mutation], results: Results, detectors: Sequence[str]) -> str:
    found = sum(bool(caught_by(results.of(each), detectors)) for each in rows)
    return f"{found} ({100 * found / max(len(rows), 1):.1f} %)"


def _survivors(rows: Collection[Mutation], results: Results) -> str:
    cells = [["mutation", "where", "caught by", "explanation"]]
    for each in survivors(rows, results):
        others = ", ".join(caught_by(results.of(each))) or "nothing"
        cells.append([each.name, WHERE[each.reach], others, each.explained])
    return table(cells)


def _every(rows: Collection[Mutation], results: Results) -> str:
    cells = [["mutation", "kind", "file", *DETECTORS]]
    cells += [
        [each.name, each.kind.value if each.kind else "", *_looked(each, results, DETECTORS)]
        for each in rows
    ]
    return table(cells)


def _looked(row: Mutation, results: Results, detectors: Collection[str]) -> list[str]:
    """A row's file and each detector's cell: the seconds in which it caught the row, or a word."""
    found = [results.of(row).get(name, {"word": NOT_RUN}) for name in detectors]
    words = (f"{x['seconds']:.0f} s" if x["word"] == CAUGHT else x["word"] for x in found)
    return [row.file.removeprefix("jaxptd/"), *words]


def _tested(rows: Collection[Mutation], results: Results) -> str:
    have = [each for each in rows if results.of(each)]
    seen, caught = (
        {name: sum(test(results.of(each), name) for each in have) for name in TESTED}
        for test in (ran, lambda found, name: name in caught_by(found))
    )
    said = (
        f"{len(rows)} mutations, of which {len(have)} have been run since findings are recorded: "
        f"the default tests catch {caught['default']} of {seen['default']}; of the others "
        f"the slow tests have been run for {seen['slow']}, and catch {caught['slow']}."
    )
    cells = [["mutation", "file", *TESTED]]
    cells += [[each.name, *_looked(each, results, TESTED)] for each in have]
    return "\n\n".join([said, *([table(cells)] if have else [])])
