"""`jaxptd verify --random`: its outcome, its record, and how it shrinks a failing case."""

import json

import pytest

from jaxptd import verify
from jaxptd.errors import UserError
from jaxptd.proof import run
from jaxptd.proof.compare import Comparer, Ending
from jaxptd.proof.draw import Share, made
from jaxptd.proof.run import FILE, minimised
from jaxptd.proof.values import DRAWN, plain

PLAIN = {name: plain(name) for name in DRAWN}


def command(folder, *words: str) -> int:
    return verify.main(["--seed", "3", "--out", str(folder), *words])


class Fake:
    """Reports cases with tp or cp as unequal, all others as equal."""

    def __init__(self) -> None:
        self.compared = 0

    def compare(self, config) -> Ending:
        self.compared += 1
        wrong = config.layout.tp > 1 or config.layout.cp > 1
        return Ending("unequal" if wrong else "equal", "words", 1e-16)


@pytest.fixture
def fake(monkeypatch):
    found = Fake()
    monkeypatch.setattr(run, "Comparer", lambda: found)
    return found


def test_a_run_ends_with_a_table_and_goes_on_from_its_record(fake, tmp_path, capsys) -> None:
    assert command(tmp_path, "--random", "1", "--quiet") in (0, 1)
    first = (tmp_path / FILE).read_text()
    compared = fake.compared
    assert command(tmp_path, "--random", "1") in (0, 1)
    assert (fake.compared, (tmp_path / FILE).read_text()) == (compared, first)
    command(tmp_path, "--random", "2")
    assert fake.compared > compared
    out = capsys.readouterr().out
    assert "pairs of values that met" in out
    assert "seed 3, 8 devices: " in out


def test_a_run_that_failed_ends_with_1_and_the_smallest_command(fake, tmp_path, capsys) -> None:
    assert command(tmp_path, "--random", "4", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["outcomes"]["unequal"] == len(found["failures"]) > 0
    assert sum(found["outcomes"].values()) == 4
    smallest = {line["smallest"] for line in found["failures"]}
    assert any(each.count("--layout.") == 1 for each in smallest), smallest


def test_a_case_that_ended_the_process_has_crashed(fake, tmp_path, capsys, monkeypatch) -> None:
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Fake, "compare", killed)
    with pytest.raises(KeyboardInterrupt):
        command(tmp_path, "--random", "1")
    assert command(tmp_path, "--random", "1", "--quiet") == 1
    assert "case 0 crashed: the process ended during this case" in capsys.readouterr().out


@pytest.mark.slow
def test_processes_share_the_cases_and_the_record(fake, tmp_path, capsys, monkeypatch) -> None:
    shares = []

    def one_after_the_other(work, count, *given) -> list[int]:
        for number in range(count):
            shares.append({*_cases(tmp_path / "many")})
            work(Share(number, count), *given)
        return [0] * count

    monkeypatch.setattr(run, "run_in_processes", one_after_the_other)
    monkeypatch.setattr(run, "MOST_MINIMISED", 0)
    words = ["--random", "5", "--json"]
    assert command(tmp_path / "many", *words, "--jobs", "2") == 1
    assert shares == [set(), {0, 1, 2, 3}]
    assert command(tmp_path / "one", *words) == 1
    many, one = map(json.loads, capsys.readouterr().out.splitlines())
    assert many | {"failures": 0} == one | {"failures": 0}
    assert _cases(tmp_path / "many").keys() == {*range(5)}


def _cases(folder) -> dict:
    path = folder / FILE
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return {line["case"]: line for line in map(json.loads, lines)}


@pytest.mark.slow
def test_a_process_that_ended_early_is_named(fake, tmp_path, capsys, monkeypatch) -> None:
    def second_killed(work, count, *given) -> list[int]:
        work(Share(0, count), *given)
        return [0, -11]

    monkeypatch.setattr(run, "run_in_processes", second_killed)
    monkeypatch.setattr(Fake, "compare", lambda *_: Ending("equal", "words"))
    assert command(tmp_path, "--random", "5", "--jobs", "2", "--json") == 1
    printed = capsys.readouterr()
    assert "process 1 ended early, with -11; repeat the command" in printed.err
    assert json.loads(printed.out)["outcomes"]["equal"] == 4


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--random", "0"], "--random 0: use 1 or more"),
        (["--random", "2", "--devices", "9"], "--devices 9: use 8 or 16"),
        (["--random", "2", "--minutes", "0"], "--minutes 0: use a number above 0"),
        (["--random", "2", "--case", "2"], "--case 2: use 0 to 1"),
        (["--random", "2", "--jobs", "0"], "--jobs 0: use 1 or more"),
        (["--random", "2", "--case", "1", "--jobs", "2"], "no effect with --case"),
        (["--jobs", "2"], "--jobs has no effect without --random"),
        (["--random", "2", "--layout.tp", "2"], "leave --config, --run-dir and fields out"),
        (["--minutes", "2"], "--minutes has no effect without --random"),
    ],
)
def test_impossible_options_are_refused_in_a_line(tmp_path, words, line) -> None:
    with pytest.raises(UserError, match=line):
        verify.main([*words, "--out", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


def test_the_record_of_other_cases_is_refused(fake, tmp_path) -> None:
    command(tmp_path, "--random", "1", "--quiet")
    with pytest.raises(UserError, match="name another folder with --out"):
        verify.main(["--random", "1", "--seed", "4", "--out", str(tmp_path)])


def test_a_case_is_reduced_to_what_makes_it_fail(tmp_path) -> None:
    values = PLAIN | {"layout.tp": 2, "layout.dp": 2, "model.remat": "full", "model.dropout": 0.1}
    made(values, tmp_path)

    def compare(config) -> Ending:
        return Ending("crashed" if config.layout.tp > 1 and config.model.dropout else "equal", "")

    left, config = minimised(values, tmp_path, compare)
    assert {name: x for name, x in left.items() if x != PLAIN[name]} == {
        "layout.tp": 2,
        "model.dropout": 0.1,
    }
    assert str(config.layout) == "tp=2"


@pytest.mark.slow
def test_a_drawn_case_is_equal_to_one_device(tmp_path) -> None:
    values = PLAIN | {"layout.tp": 2, "model.num_layers": 2, "model.dtype": "float32"}
    ending = Comparer().compare(made(values, tmp_path))
    assert ending.outcome == "equal", ending
    assert 0 < ending.worst < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_cases_are_equal_to_one_device(tmp_path, seed: int) -> None:
    assert verify.main(["--random", "12", "--seed", str(seed), "--out", str(tmp_path)]) == 0
