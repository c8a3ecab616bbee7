"""`jaxptd pipeline`: its output, its files, and its messages about bad input."""

import json
import subprocess
import sys

import pytest
from command_lines import refused

from jaxptd.commands.pipeline import main
from jaxptd.pipeline.picture import as_text, as_trace, render
from jaxptd.pipeline.schedules import SCHEDULES, make_schedule, to_csv
from jaxptd.pipeline.statistics import Durations

SIZES = ["--stages", "4", "--micro-batches", "8"]


def numbers(capsys, *argv: str) -> dict:
    main([*SIZES, *argv, "--json"])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


def test_it_prints_the_table_and_its_costs(capsys, wide):
    main([*SIZES, "--schedule", "1f1b"])
    out = capsys.readouterr().out
    schedule = make_schedule("1f1b", stages=4, micro_batches=8)
    assert out.startswith(as_text(schedule, width=120).plain + "\n")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert [row for row in rows if row] == [
        ["ticks", "22", ""],
        ["time of a step", "33", ""],
        ["as run, with waiting at hops", "33", ""],
        ["bubble", "37.5%", "37.5%"],
        ["idle, with start and end", "27.3%", ""],
        ["held by each stage", "4 3 2 1", "4 3 2 1"],
        ["messages", "48", ""],
    ]


def test_the_default_is_1f1b(capsys):
    assert numbers(capsys)["schedule"] == "1f1b"


def test_a_config_has_what_is_left_out(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "model: {num_layers: 16}\ntrain: {micro_batches: 8}\n"
        "layout: {pp: 4, schedule: interleaved, virtual_stages: 3}\n"
    )

    def sizes(*argv: str) -> tuple:
        main(["--run-dir", str(tmp_path), *argv, "--json"])
        found = json.loads(capsys.readouterr().out)
        names = ("schedule", "stages", "micro_batches", "virtual_stages")
        return tuple(found[name] for name in names)

    assert sizes() == ("interleaved", 4, 8, 3)
    assert sizes("--layout.pp", "2", "--train.micro_batches=4") == ("interleaved", 2, 4, 3)
    assert sizes("--schedule", "zb-h1") == ("zb-h1", 4, 8, 1)
    assert sizes("--virtual-stages", "2") == ("interleaved", 4, 8, 2)


def test_quiet_prints_the_numbers_without_the_table(capsys, wide):
    main([*SIZES, "--quiet"])
    out = capsys.readouterr().out
    assert "stage 0" not in out
    assert "bubble" in out


def test_json_has_the_numbers(capsys):
    found = numbers(capsys, "--schedule", "interleaved", "--virtual-stages", "3")
    assert 27 < found.pop("time_as_run") <= 54 * 2 / 3  # a tick takes at most as long as a backward
    assert found == {
        "schedule": "interleaved",
        "stages": 4,
        "micro_batches": 8,
        "virtual_stages": 3,
        "placement": "loop",
        "ticks": 54,
        "time": 27.0,
        "bubble": pytest.approx(0.125),
        "bubble_formula": 0.125,
        "idle": pytest.approx(1 / 9),
        "held": pytest.approx([5, 13 / 3, 11 / 3, 3]),
        "held_formula": pytest.approx([5, 13 / 3, 11 / 3, 3]),
        "messages": 176,
    }


def test_without_a_formula_there_is_a_dash(capsys, wide):
    argv = ["--schedule", "interleaved", "--stages", "4", "--micro-batches", "7"]
    main([*argv, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["bubble_formula"], found["held_formula"]) == (None, None)
    main(argv)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("│")[3].strip() for line in lines if "│ bubble" in line] == ["-"]
    assert [line.split("│")[3].strip() for line in lines if "│ held" in line] == ["-"]


def test_durations_change_the_times(capsys):
    found = numbers(capsys, "--schedule", "zb-h1", "--durations", "1", "1.25", "0.75")
    assert found["bubble"] == pytest.approx(3 * 1.5 / 24)
    assert found["bubble_formula"] == pytest.approx(3 * 1.5 / 24)
    assert found["ticks"] == 27


def test_compare_has_a_line_for_each_schedule(capsys, wide):
    main([*SIZES, "--compare", "--schedule", "interleaved", "--virtual-stages", "3"])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert [row[0] for row in rows] == list(SCHEDULES)
    assert rows[2][:4] == ["interleaved", "3", "54", "27"]
    assert rows[2][5:] == ["12.5%", "12.5%", "5", "176"]
    assert rows[5] == ["zb-v", "2", "51", "25.5", "25.5", "0.0%", "0.0%", "4", "96"]


def test_compare_as_json(capsys):
    found = numbers(capsys, "--compare")
    assert [row["schedule"] for row in found] == ["1f1b", *(n for n in SCHEDULES if n != "1f1b")]
    assert found[1] == numbers(capsys, "--schedule", "gpipe")


def test_compare_with_a_table_from_a_file(capsys, tmp_path):
    path = tmp_path / "m.csv"
    main([*SIZES, "--schedule", "zb-h1", "--csv", str(path), "--json"])
    capsys.readouterr()
    main([*SIZES, "--schedule", str(path), "--compare", "--json"])
    mine, *others = json.loads(capsys.readouterr().out)
    assert mine["schedule"] == str(path)
    assert [row["schedule"] for row in others] == list(SCHEDULES)
    same = next(row for row in others if row["schedule"] == "zb-h1")
    assert (mine["bubble"], mine["held"]) == (same["bubble"], same["held"])


def test_it_writes_files(capsys, tmp_path):
    paths = {name: tmp_path / f"out.{name}" for name in ("svg", "json", "csv")}
    files = ["--picture", paths["svg"], "--trace", paths["json"], "--csv", paths["csv"]]
    durations = ["--durations", "1", "2", "1"]
    main([*SIZES, "--schedule", "zb-v", *durations, *map(str, files)])
    schedule = make_schedule("zb-v", stages=4, micro_batches=8)
    assert paths["svg"].read_bytes() == render(schedule, paths["svg"])
    assert json.loads(paths["json"].read_text()) == as_trace(schedule, Durations(1, 2, 1))
    assert paths["csv"].read_text() == to_csv(schedule)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--micro-batches", "8"], ["--stages", "required"]),
        ([*SIZES, "--stages", "0"], ["stages=0", "use 1 or more"]),
        ([*SIZES, "--stages", "four"], ["--stages", "four"]),
        ([*SIZES, "--schedule", "2f2b"], ["2f2b", "zb-h1"]),
        ([*SIZES, "--schedule", "none.csv"], ["none.csv", "No such file"]),
        ([*SIZES, "--virtual-stages", "2"], ["1f1b", "leave virtual_stages out"]),
        ([*SIZES, "--durations", "1", "0", "1"], ["(1.0, 0.0, 1.0)", "1e-9"]),
        ([*SIZES, "--picture", "out.jpg"], ["out.jpg", ".png or .svg"]),
        ([*SIZES, "--trace", "x.json", "--csv", "x.json"], ["--trace", "give each its own"]),
        ([*SIZES, "--csv", "out.csv", "--trace", "none/x.json"], ["none/x.json", "No such file"]),
        ([*SIZES, "--pictures", "out.png"], ["--pictures"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_nothing_is_written(
    capsys, monkeypatch, tmp_path, argv, words
):
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, main, argv)
    assert all(word in err for word in words), err
    assert not list(tmp_path.iterdir())


def test_a_longer_interleaved_schedule_is_a_warning(capsys):
    main(["--stages", "8", "--micro-batches", "9", "--schedule", "interleaved", "--json"])
    out, err = capsys.readouterr()
    assert json.loads(out)["ticks"] == 64
    assert err == (
        "warning: schedule=interleaved takes 64 ticks where 50 would do, since micro_batches=9 is "
        "not a multiple of stages=8; use 8 or 16 micro-batches\n"
    )


def test_as_a_command():
    command = [sys.executable, "-m", "jaxptd", "pipeline"]
    run = {"capture_output": True, "text": True, "check": False, "timeout": 120}
    good = subprocess.run([*command, *SIZES, "--json"], **run)
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["ticks"] == 22
    bad = subprocess.run([*command, *SIZES, "--schedule", "no"], **run)
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
