"""The table of defects is well-formed, findings are kept, and one row is run to its end."""

import ast
import json
from datetime import UTC, datetime

import pytest

from benchmarks.breaks.__main__ import ROOT, broken
from benchmarks.breaks.table import Break
from benchmarks.defects import detectors
from benchmarks.defects import results as results_of_defects
from benchmarks.defects.__main__ import RESULTS, main
from benchmarks.defects.detectors import CAUGHT, DETECTORS, MISSED, NO_RESULT, NOT_RUN
from benchmarks.defects.page import headline, page
from benchmarks.defects.probe import config_of
from benchmarks.defects.results import Results, caught_by, kinds, rates
from benchmarks.defects.rows import ALL
from benchmarks.defects.table import Kind, Reach
from jaxptd.errors import UserError

FIRST = ALL[0]


def test_every_defect_can_be_made_and_every_kind_is_there() -> None:
    for row in ALL:
        text = (ROOT / row.patch.file).read_text()
        found = broken(text, row.patch)
        assert found != text
        ast.parse(found)
    assert len({row.name for row in ALL}) == len(ALL) >= 80
    assert {row.kind for row in ALL} == {*Kind}


def test_every_case_is_a_config_of_up_to_eight_devices() -> None:
    cases = {case for row in ALL for case in row.cases}
    assert max(config_of(case).layout.num_devices for case in cases) == 8
    assert [row.name for row in ALL if row.reach is not Reach.RUN and not row.cases] == []


def test_every_defect_names_tests_that_are_there() -> None:
    assert [row.name for row in ALL if not row.patch.tests] == []
    paths = {path for row in ALL for path in row.patch.tests.split()}
    assert [path for path in paths if not (ROOT / path).exists()] == []  # nor an option, as -m slow


def test_the_published_tables_are_those_of_the_results() -> None:
    proof = (ROOT / "docs" / "proof.md").read_text()
    found = (RESULTS / "defects.md").read_text()
    published = found[found.index("## Rates") : found.index("## What neither")].splitlines()
    missing = [line for line in published if line.startswith(("|", "-")) and line not in proof]
    assert missing == []


def test_findings_are_kept_until_the_code_changes(tmp_path) -> None:
    path = tmp_path / "defects.json"
    results = Results(path)
    assert results.missing(FIRST, DETECTORS) == [*DETECTORS]
    found = {"word": CAUGHT, "seconds": 1.0, "found": "loss"}
    results.add(FIRST, {"verify": found, "default": {**found, "word": NO_RESULT}})
    again = Results(path)
    assert again.missing(FIRST, ["tracing", "verify", "default"]) == ["tracing", "default"]
    assert caught_by(again.of(FIRST)) == ["verify"]
    other = FIRST._replace(patch=FIRST.patch._replace(new="    return 3 * x\n\n\ndef local_block"))
    assert again.missing(other, ["verify"]) == ["verify"]
    assert again.missing(FIRST._replace(cases=("layout.tp=2",)), ["verify"]) == ["verify"]


def test_findings_of_tests_are_kept_until_the_tests_change(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(results_of_defects, "ROOT", tmp_path)
    for path in (FIRST.patch.file, *FIRST.patch.tests.split()):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((ROOT / path).read_text())
    results = Results(tmp_path / "defects.json")
    caught = {"word": CAUGHT, "seconds": 1.0, "found": ""}
    results.add(FIRST, {"verify": caught, "default": caught, "slow": caught})
    assert results.missing(FIRST, ["verify", "default", "slow"]) == []
    (tmp_path / path).write_text("pytestmark = pytest.mark.slow\n" + (ROOT / path).read_text())
    assert results.missing(FIRST, ["verify", "default", "slow"]) == ["default", "slow"]


def test_a_page_counts_what_each_detector_caught(tmp_path) -> None:
    results = Results(tmp_path / "defects.json")
    caught = {"word": CAUGHT, "seconds": 2.0, "found": ""}
    results.add(FIRST, {"verify": caught, "comms": {**caught, "word": MISSED}})
    day = datetime.now(UTC).date().isoformat()
    assert rates(ALL, results)[2] == ["verify", "1", "1", "1", "2", "2", day]
    assert rates(ALL, results)[3][1:4] == ["1", "0", "0"]
    assert rates(ALL, results)[4][1:] == ["0", "0", "0", "0", "0", ""]
    assert [row[-1] for row in kinds(ALL, results)[1:]].count("1") == 1
    said = "tracing or verify catches 1 (100.0 %), the default tests catch 0 (0.0 %)"
    assert said in headline([FIRST], results)
    text = page(ALL, results)
    assert all(row.name in text for row in ALL)


def test_a_defect_that_changes_no_step_is_not_looked_for_in_one() -> None:
    found = detectors.probe((), ROOT)
    assert {each["word"] for each in found.values()} == {NOT_RUN}


@pytest.mark.parametrize(
    ("default", "slow", "words"),
    [
        ("True", "False", [MISSED, CAUGHT]),
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
    (tmp_path / "test_it.py").write_text(text)
    found = detectors._suite(Break("", "", "", "", "test_it.py"), tmp_path)
    assert [found[name]["word"] for name in ("default", "slow")] == words


@pytest.mark.slow
def test_tests_that_do_not_run_are_no_finding() -> None:
    row = Break("", "", "", "", "tests/no/such/file.py")
    found = detectors._suite(row, ROOT)
    assert {name: each["word"] for name, each in found.items()} == {
        "default": NO_RESULT,
        "slow": NOT_RUN,
    }


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match="no defect is named bliss; see --list"):
        main(["--run", "bliss"])
    with pytest.raises(UserError, match="no detector is named eyes; use tracing, verify"):
        main(["--run", FIRST.name, "--detectors", "eyes"])


def test_published_findings_are_of_defects_that_are_there() -> None:
    names = json.loads((RESULTS / "defects.json").read_text())["defects"]
    assert {*names} == {row.name for row in ALL}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "by"),
    [("reduce_from sums as often as there are devices", "verify"), ("sums nothing", "comms")],
)
def test_a_defect_is_run_to_its_end(tmp_path, name: str, by: str) -> None:
    names = ["--run", name, "--detectors", "tracing,verify,comms", "--results", str(tmp_path)]
    assert main(names) == 0
    rows = json.loads((tmp_path / "defects.json").read_text())["defects"]
    assert any(row[by]["word"] == CAUGHT for row in rows.values())
    assert "# Injected defects" in (tmp_path / "defects.md").read_text()


@pytest.mark.slow
def test_without_a_defect_nothing_is_found() -> None:
    found = detectors.probe(("layout.dp=2 layout.tp=2",), ROOT)
    assert {name: each["found"] for name, each in found.items()} == dict.fromkeys(found, "")
    assert {each["word"] for each in found.values()} == {MISSED}
