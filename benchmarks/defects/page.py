"""The page of results: rates, kinds, what verify does not see, and every defect."""

from collections.abc import Collection, Sequence
from importlib.metadata import version

from benchmarks.defects.detectors import CAUGHT, DETECTORS, NOT_RUN
from benchmarks.defects.results import (
    Results,
    caught_by,
    is_step,
    kinds,
    rates,
    survivors,
)
from benchmarks.defects.table import Defect, Reach
from jaxptd.analysis.report import table

WHERE = {
    Reach.LAYOUT: "a layout differs from one device",
    Reach.BOTH: "one device is wrong, too",
    Reach.RUN: "no step is wrong",
}


def page(defects: Collection[Defect], results: Results) -> str:
    """The page as markdown."""
    parts = [
        "# Injected defects",
        f"`python -m benchmarks.defects --run`, jax {version('jax')}, simulated devices.",
        "A defect is a patch of one line of meaning in a copy of the repository. Each detector "
        "runs in a process of its own (tracing, verify and comms in one); its seconds are those to "
        "its verdict, with imports. A dash: not run, as what cannot be traced cannot be run, and "
        "slow tests look only for what the default ones do not find. "
        "`verify` runs in float64 first, on the tiny config, with compiled programs cached.",
        "## Rates\n\n" + table(rates(defects, results)) + "\n\n" + headline(defects, results),
        "## Kinds\n\nDefects caught by each detector.\n\n" + table(kinds(defects, results)),
        "## What neither tracing nor verify catches\n\n" + _survivors(defects, results),
        "## Every defect\n\n" + _every(defects, results),
    ]
    return "\n\n".join(parts) + "\n"


def headline(defects: Collection[Defect], results: Results) -> str:
    """The shares that are published, in words."""
    steps = [each for each in defects if is_step(each)]
    spread = [each for each in steps if each.reach is Reach.LAYOUT]
    every = [each for each in defects if not each.explained]
    lines = [
        _shares("change what a step of a layout computes", spread, results),
        _shares("change what a step computes, anywhere", steps, results),
        _shares("change anything", every, results),
    ]
    explained = [each for each in defects if each.explained]
    lines.append(
        f"{len(explained)} change no number, for a reason that is given below; "
        f"comms catches {sum('comms' in caught_by(results.of(each)) for each in explained)} of "
        "them by their bytes."
    )
    return "\n".join(f"- {line}" for line in lines)


def _shares(words: str, defects: Sequence[Defect], results: Results) -> str:
    said = [
        f"{who} {_share(defects, results, detectors)}"
        for who, detectors in (
            ("tracing or verify catches", ("tracing", "verify")),
            ("the default tests catch", ("default",)),
            ("any detector", DETECTORS),
        )
    ]
    return f"{len(defects)} {words}: {', '.join(said)}."


def _share(defects: Sequence[Defect], results: Results, detectors: Sequence[str]) -> str:
    found = sum(bool(caught_by(results.of(each), detectors)) for each in defects)
    return f"{found} ({100 * found / max(len(defects), 1):.1f} %)"


def _survivors(defects: Collection[Defect], results: Results) -> str:
    rows = [["defect", "where", "caught by", "explanation"]]
    for each in survivors(defects, results):
        others = ", ".join(caught_by(results.of(each))) or "nothing"
        rows.append([each.name, WHERE[each.reach], others, each.explained])
    return table(rows)


def _every(defects: Collection[Defect], results: Results) -> str:
    rows = [["defect", "kind", "file", *DETECTORS]]
    for each in defects:
        found = results.of(each)
        cells = [_cell(found.get(name, {"word": NOT_RUN})) for name in DETECTORS]
        rows.append([each.name, each.kind.value, each.patch.file.removeprefix("jaxptd/"), *cells])
    return table(rows)


def _cell(finding: dict) -> str:
    if finding["word"] != CAUGHT:
        return finding["word"]
    return f"{finding['seconds']:.0f} s"
