"""Rows are well-formed, findings are kept while they are valid, and one row is run completely."""

import hashlib
import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.mutations import detectors
from benchmarks.mutations import results as results_of_mutations
from benchmarks.mutations.__main__ import RESULTS, main
from benchmarks.mutations.detectors import (
    CAUGHT,
    DETECTORS,
    MISSED,
    NO_RESULT,
    NOT_RUN,
    TESTED,
)
from benchmarks.mutations.matching import Change
from benchmarks.mutations.page import headline, page
from benchmarks.mutations.probe import config_of
from benchmarks.mutations.results import Results, caught_by, kinds, rates
from benchmarks.mutations.table import ROOT, ROWS, Kind, Mutation, Reach, mutations, read
from jaxptd.errors import UserError

ALL = mutations()
LOOKED_FOR = [row for row in ALL if row.kind]
(FIRST,) = (row for row in ALL if row.name == "reduce_from sums nothing")
FOUND = {"word": CAUGHT, "seconds": 1.0, "found": "loss"}
TEXT = '''
"""A module."""
from jax import lax


def total(x, axis):
    """Sums x."""
    y = lax.psum(x, axis)
    return y


def other(x):
    return x
'''


# --- The rows


def test_every_mutation_can_be_made_and_every_kind_is_there() -> None:
    for row in ALL:
        text = (ROOT / row.file).read_text()
        made = row.made(text)  # which parses it
        assert made != text
    assert len({row.name for row in ALL}) == len(ALL) >= 520
    assert {row.kind for row in LOOKED_FOR} == {*Kind}


def test_every_row_of_the_files_is_read() -> None:
    texts = [path.read_text() for path in ROWS.glob("*.yaml")]
    written = sum(text.count("\n- name: ") for text in texts)
    repeated = [
        re.findall(r"\w+(?=: )", each) for each in re.findall(r"each: {(.*)}", "".join(texts))
    ]
    assert len(ALL) == written + sum(len(names) - 1 for names in repeated)
    headings = re.findall(r"^\w\S*:$", "\n".join(texts), re.M)
    assert sorted(headings) == sorted({f"{row.file}:" for row in ALL})  # YAML keeps the last of two


def test_every_case_is_a_config_of_up_to_eight_devices() -> None:
    cases = {case for row in ALL for case in row.cases}
    assert max(config_of(case).layout.num_devices for case in cases) == 8
    lacking = [row.name for row in LOOKED_FOR if row.reach is not Reach.RUN and not row.cases]
    assert lacking == []


def test_every_mutation_names_tests_that_are_there() -> None:
    assert [row.name for row in ALL if not row.tests] == []
    paths = {path for row in ALL for path in row.tests.split()}
    assert [path for path in paths if not (ROOT / path).exists()] == []  # nor an option, as -m slow


def test_a_row_that_fits_nowhere_says_which_it_is() -> None:
    change = FIRST.changes[0]._replace(old="lax.pmin(x, axis)")
    words = (
        r"^reduce_from sums nothing: jaxptd/collectives.py: reduce_from has 'lax.pmin\(x, axis\)' 0"
    )
    with pytest.raises(UserError, match=words):
        FIRST._replace(changes=(change,)).made((ROOT / FIRST.file).read_text())


def test_rows_of_each_axis_and_of_several_places_are_read() -> None:
    text = """
jaxptd/a.py:
- name: no sum over EACH
  each: {dp: DP, tp: TP model.dropout=0}
  in f.g: [a => EACH, "b => 1"]
  tests: tests/a.py tests/b.py -k one and two
  detect: {kind: RING, cases: [CP], reach: BOTH}
configs/b.yaml:
- {name: other, in module: 1 => 2, tests: tests/c.py}
"""
    dp, tp, other = read(text)
    assert [dp.name, dp.cases] == ["no sum over dp", ("layout.cp=4", "layout.dp=4")]
    assert tp.cases == ("layout.cp=4", "layout.tp=4 model.dropout=0")
    assert tp.changes == (Change("f.g", "a", "tp"), Change("f.g", "b", "1"))
    assert (tp.tests, tp.select) == ("tests/a.py tests/b.py", "one and two")
    assert (tp.kind, tp.reach, other.kind) == (Kind.RING, Reach.BOTH, None)
    assert other.made("a: 1\n") == "a: 2\n"
    with pytest.raises(UserError, match="2 times, not once"):
        other.made("a: 1\nb: 1\n")
    for wrong, words in (
        ("a", "write OLD => NEW, not 'a'"),
        ("a => b\n  slect: b", "has no slect"),
    ):
        with pytest.raises(UserError, match=words):
            list(read(f"a.py:\n- name: other\n  tests: t\n  in f: {wrong}\n"))


# --- Findings


def row_of(**more) -> Mutation:
    changes = (Change("total", "lax.psum(x, axis)", "x"),)
    row = Mutation(name="no sum", file="a.py", changes=changes, tests="test_a.py")
    return row._replace(**more)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A repository in which `row_of` has findings from all detectors."""
    monkeypatch.setattr(results_of_mutations, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(TEXT)
    (tmp_path / "test_a.py").write_text("def test_a(): pass\n")
    row = row_of(kind=Kind.RING, cases=("layout.tp=2",))
    Results(tmp_path / "mutations.json").add(row, dict.fromkeys(DETECTORS, FOUND))
    return tmp_path


def missing(folder: Path, **more) -> list[str]:
    row = row_of(**{"kind": Kind.RING, "cases": ("layout.tp=2",), **more})
    return Results(folder / "mutations.json").missing(row, DETECTORS)


@pytest.mark.parametrize(
    ("old", "new", "is_kept"),
    [
        ("lax.psum(x, axis)", "lax.psum(\n        x, axis  # all\n    )", True),
        ("y", "result", True),
        ("Sums x.", "Sums x over devices.", True),
        ("def other(x):\n    return x", "def other(x):\n    return -x", True),
        ("return y", "return 2 * y", False),
        ("lax.psum(x, axis)", "lax.psum(x, axis) + 1", False),
    ],
)
def test_findings_are_kept_until_the_function_changes(folder, old, new, is_kept) -> None:
    (folder / "a.py").write_text(TEXT.replace(old, new))
    assert missing(folder) == ([] if is_kept else [*DETECTORS])


def test_findings_of_one_version_of_python_are_those_of_another() -> None:
    """Includes a nested format, which Python 3.12 parses differently."""
    text = (
        'def f(x, n):\n    """Doc."""\n    y: list[int] = x[n, :]\n    return f"{y!r:>{n}}", *x\n'
    )
    row = row_of()._replace(changes=(Change("f", "x[n, :]", "x[n:]"),))
    (before,), (after,) = row.difference(text)
    assert hashlib.sha256((before + after).encode()).hexdigest()[:16] == "32425d129ac9a7b9"


def test_findings_are_kept_until_the_row_changes(folder) -> None:
    assert missing(folder) == []
    assert missing(folder, name="other") == [*DETECTORS]
    assert missing(folder, changes=(Change("total", "lax.psum(a, b)", "a"),)) == []  # the same
    assert missing(folder, changes=(Change("total", "lax.psum(x, axis)", "2 * x"),)) == [*DETECTORS]
    assert missing(folder, cases=("layout.tp=4",)) == ["tracing", "verify", "comms"]
    assert missing(folder, select="a") == [*TESTED]


def test_findings_of_tests_are_kept_until_the_tests_change(folder) -> None:
    (folder / "test_a.py").write_text("def test_a(): assert 1\n")
    assert missing(folder) == [*TESTED]
    assert missing(folder, kind=None) == [*TESTED]


def test_what_gave_no_result_is_looked_for_again(folder) -> None:
    row = row_of(kind=Kind.RING, cases=("layout.tp=2",))
    results = Results(folder / "mutations.json")
    results.add(row, {"default": {**FOUND, "word": NO_RESULT}})
    assert missing(folder) == ["default"]
    assert caught_by(results.of(row), ("verify", "default")) == ["verify"]


# --- The page


def test_the_published_rates_are_those_of_the_results() -> None:
    proof = (ROOT / "docs" / "proof.md").read_text().splitlines()
    found = (RESULTS / "mutations.md").read_text()
    rated = found[found.index("## Rates") : found.index("## Kinds")].splitlines()
    wanted = [line for line in rated if line.startswith(("|", "-"))]
    assert len(wanted) > len(DETECTORS)
    assert [line for line in wanted if line not in proof] == []


def test_the_page_for_developers_has_every_wrong_step_that_verify_does_not_catch() -> None:
    found = (RESULTS / "mutations.md").read_text().partition("## What neither")[2]
    hidden = re.findall(
        r"^\| (.+?) \| (?:a layout differs|one device is) .*? \| (.+?) \|", found, re.M
    )
    page = (ROOT / "docs" / "developers" / "mutations.md").read_text()
    assert hidden
    assert [row for row in hidden if "| {} | {} |".format(*row) not in page] == []


def test_published_findings_are_of_mutations_that_are_there() -> None:
    names = {*json.loads((RESULTS / "mutations.json").read_text())["mutations"]}
    assert names <= {row.name for row in ALL}
    assert {row.name for row in LOOKED_FOR} <= names


def test_a_page_counts_what_each_detector_caught(tmp_path) -> None:
    results = Results(tmp_path / "mutations.json")
    caught = {"word": CAUGHT, "seconds": 2.0, "found": ""}
    results.add(FIRST, {"verify": caught, "comms": {**caught, "word": MISSED}})
    (tested, *_) = (each for each in ALL if not each.kind)
    results.add(tested, {"default": {**caught, "word": MISSED}, "slow": caught})
    day = datetime.now(UTC).date().isoformat()
    assert rates(LOOKED_FOR, results)[2] == ["verify", "1", "1", "1", "2", "2", day]
    assert rates(LOOKED_FOR, results)[3][1:4] == ["1", "0", "0"]
    assert rates(LOOKED_FOR, results)[4][1:] == ["0", "0", "0", "0", "0", ""]
    assert [row[-1] for row in kinds(ALL, results)[1:]].count("1") == 1
    said = "tracing or verify catches 1 (100.0 %), the default tests catch 0 (0.0 %)"
    assert said in headline([FIRST], results)
    text = page(ALL, results)
    assert all(row.name in text for row in LOOKED_FOR)
    assert "of which 1 have been run" in text
    assert "the default tests catch 0 of 1; of the others" in text
    assert "the slow tests have been run for 1, and catch 1." in text
    assert f"| {tested.name} |" in text


# --- The detectors


@pytest.mark.parametrize(
    ("default", "slow", "words"),
    [
        ("True", "True", [MISSED, MISSED]),
        ("False", "False", [CAUGHT, NOT_RUN]),
        (None, "False", [MISSED, CAUGHT]),
    ],
)
def test_slow_tests_look_for_what_the_default_ones_do_not_find(
    tmp_path, default, slow, words
) -> None:
    text = f"import pytest\n\n\n@pytest.mark.slow\ndef test_slow():\n    assert {slow}\n"
    if default:
        text += f"\n\ndef test_default():\n    assert {default}\n"
    (tmp_path / "test_a.py").write_text(text)
    found = detectors.suite(row_of(), tmp_path)
    assert [found[name]["word"] for name in TESTED] == words


@pytest.mark.slow
def test_tests_that_do_not_run_are_no_finding() -> None:
    found = detectors.look(row_of()._replace(tests="tests/no/such/file.py"), TESTED, ROOT)
    words = {name: each["word"] for name, each in found.items()}
    assert words == {"default": NO_RESULT, "slow": NOT_RUN}
    assert {each["word"] for each in detectors.probe((), ROOT).values()} == {NOT_RUN}


# --- The command


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match="no mutation is named bliss; see --list"):
        main(["--run", "bliss"])
    with pytest.raises(UserError, match="no detector is named eyes; use tracing, verify"):
        main(["--run", FIRST.name, "--detectors", "eyes"])


@pytest.mark.parametrize(("word", "code"), [(CAUGHT, 0), (MISSED, 1), (NO_RESULT, 1)])
def test_the_exit_code_says_if_what_was_run_goes_unnoticed(
    tmp_path, monkeypatch, capsys, word, code
) -> None:
    asked = []

    def run(row, names):
        asked.append((row.name, *names))
        return {name: {**FOUND, "word": word} for name in names}

    monkeypatch.setattr(detectors, "run", run)
    command = ["--run", FIRST.name, "--results", str(tmp_path)]
    assert main([*command, "--tests"]) == code
    assert asked == [(FIRST.name, *TESTED)]
    assert (f"{FIRST.name}: NOT noticed" in capsys.readouterr().out) == bool(code)
    assert main([*command, "--detectors", "default"]) == code
    assert main([*command, "--detectors", "verify,slow"]) == code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "by"),
    [("reduce_from sums as often as there are devices", "verify"), ("sums nothing", "comms")],
)
def test_a_mutation_is_run_to_its_end(tmp_path, name: str, by: str) -> None:
    names = ["--run", name, "--detectors", "tracing,verify,comms", "--results", str(tmp_path)]
    assert main(names) == 0
    rows = json.loads((tmp_path / "mutations.json").read_text())["mutations"]
    assert any(row[by]["word"] == CAUGHT for row in rows.values())
    assert "# Mutations" in (tmp_path / "mutations.md").read_text()


@pytest.mark.slow
def test_without_a_mutation_nothing_is_found() -> None:
    found = detectors.probe(("layout.dp=2 layout.tp=2",), ROOT)
    assert {name: each["found"] for name, each in found.items()} == dict.fromkeys(found, "")
    assert {each["word"] for each in found.values()} == {MISSED}
