"""`jaxptd doctor`: its page, exit codes and options."""

import getpass
import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import refused

from jaxptd.commands import doctor
from jaxptd.doctor import folder, packages
from jaxptd.doctor.page import Row


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(folder, "WRITTEN", 2**20)
    monkeypatch.setattr(doctor.system, "nvidia_gpus", lambda: 0)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


def test_a_page_and_its_exit_code(tmp_path: Path, capsys, monkeypatch) -> None:
    argv = ["--config", "test-tiny", "--run-dir", str(tmp_path / "run"), "--json"]
    assert doctor.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    sections = found["sections"]
    assert list(sections) == [
        *("system", "packages", "flags", "run directory", "processes", "devices", "links"),
    ]
    assert not any("could not be checked" in str(rows) for rows in sections.values())
    assert sections["links"][0]["finding"] == "not measured: there is no accelerator"
    space = next(row for row in sections["run directory"] if row["name"] == "space")
    assert "a checkpoint takes" in space["finding"]
    assert space["finding"].endswith(", and 3 are kept")  # the newest 2 and the best one
    assert list(tmp_path.iterdir()) == []

    bad = packages.versions() | {"jaxlib": "0.9"}
    monkeypatch.setattr(packages, "versions", lambda: bad)
    assert doctor.main(["--quiet"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].count("1 problem") == 1
    assert lines[2].startswith("- **problem** packages, jaxlib: 0.9")


def test_a_run_in_a_store_is_no_folder_of_its_name(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("train: {run_dir: 'memory://bucket/a'}\n")
    assert doctor.main(["--config", "c.yaml", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["sections"]["run directory"]
    assert row["finding"] == "memory://bucket/a: not checked, it is in an object store"
    assert "run directory" not in rows_of(capsys, [])


def test_a_page_in_a_file_has_no_home(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path}/dump")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    broken = Row("system", f"/data/alice/x and {tmp_path}")
    monkeypatch.setattr(doctor.system, "system", lambda: [broken])
    out = tmp_path / "page.md"
    assert doctor.main(["--run-dir", str(tmp_path / "run"), "--out", str(out)]) == 0
    text = out.read_text()
    assert str(tmp_path) not in text
    assert "alice" not in text
    assert "| ~/run, which does not exist yet; checked ~ " in text
    assert "--xla_dump_to=~/dump" in text
    assert capsys.readouterr().out.startswith(f"wrote {out}: no problems and ")
    assert "exists; name another file" in refused(capsys, doctor.main, ["--out", str(out)])
    assert doctor.main(["--quiet", "--out", str(out), "--overwrite"]) == 0


def test_a_check_that_fails_leaves_the_others(capsys, monkeypatch) -> None:
    def fail(*_: object) -> list[Row]:
        raise ValueError("no")

    monkeypatch.setattr(doctor.system, "system", fail)
    monkeypatch.setattr(doctor, "later", fail)
    doctor.main(["--json"])
    sections = json.loads(capsys.readouterr().out)["sections"]
    assert sections["system"][0]["finding"] == "could not be checked (ValueError: no)"
    assert sections["devices"][0]["finding"] == "could not be checked (ValueError: no)"
    assert len(sections["packages"]) > 6


def rows_of(capsys, argv: list[str]) -> dict[str, list[dict[str, str]]]:
    doctor.main([*argv, "--json"])
    return json.loads(capsys.readouterr().out)["sections"]


def test_the_config_of_a_run_is_read_from_its_directory(tmp_path, capsys) -> None:
    (tmp_path / "config.yaml").write_text("layout: {tp: 2}\n")
    (layout,) = (
        row
        for row in rows_of(capsys, ["--run-dir", str(tmp_path)])["devices"]
        if row["name"] == "layout"
    )
    assert layout["finding"].startswith("tp=2 on ")


def test_gpus_that_do_not_start_still_have_known_bugs(capsys, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(doctor.system, "nvidia_gpus", lambda: 1)
    monkeypatch.setattr(doctor.nvidia, "ask_driver", lambda: "")
    monkeypatch.setattr(doctor, "later", fail)
    monkeypatch.setattr(packages, "versions", lambda: {"jaxlib": "0.11.0"})
    names = {row["name"] for row in rows_of(capsys, [])["packages"]}
    assert "jaxlib 0.11.0" in names


def test_the_longest_wait_is_an_option() -> None:
    options = doctor.read(doctor.parser().parse_args(["--config", "test-tiny", "--wait", "5"]))
    assert options.processes.wait == 5


def test_an_elastic_run_is_checked_with_the_processes_that_there_are(tmp_path, capsys) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("layout: {dp: 2}\nprocesses: {elastic: [1, 2]}\n")
    rows = rows_of(capsys, ["--config", str(config), "--run-dir", str(tmp_path / "run")])
    assert "one device on 1 " in next(
        r["finding"] for r in rows["devices"] if r["name"] == "layout"
    )
    config.write_text("layout: {dp: 4}\nprocesses: {elastic: [2, 4]}\n")
    (row,) = rows_of(capsys, ["--config", str(config)])["processes"]
    assert row["finding"].startswith("processes.elastic=[2, 4], but there is 1 process")


def test_the_driver_is_asked_before_the_other_processes_start_jax(capsys, monkeypatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(doctor.system, "nvidia_gpus", lambda: 1)
    monkeypatch.setattr(doctor.nvidia, "ask_driver", lambda: asked.append("driver") or "")
    monkeypatch.setattr(doctor.Examination, "_processes", lambda self: asked.append("join") or [])
    rows = rows_of(capsys, [])["devices"]
    assert asked == ["driver", "join"]
    assert rows[0]["finding"] == "nvidia-smi gives no answer"


def test_a_launcher_that_says_too_little(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert doctor.main(["--quiet"]) == 1
    assert "processes: processes.id=0 without" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config", "nowhere"], "no such file or packaged config"),
        (["--wait", "0"], "--wait 0: use seconds above 0"),
        (["--overwrite"], "--overwrite has no effect without --out"),
        (["--run-dir", "a" * 300], "no path is so long"),
    ],
)
def test_bad_input(argv, words, capsys) -> None:
    assert words in refused(capsys, doctor.main, argv)


def test_nothing_heavy_is_imported_for_help() -> None:
    code = (
        "import sys; from jaxptd.commands import doctor; doctor.parser();"
        "print(sorted({'jax', 'flax', 'orbax'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "[]\n", ended.stderr
