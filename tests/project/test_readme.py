"""The README: its example runs, its commands exist, its figures and table match the pages."""

import os
import re
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_lines import accept, command_lines

from jaxptd.commands.table import COMMANDS, find_command

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMPARISON = (ROOT / "docs" / "comparison.md").read_text()
LIBRARIES = ("Megatron-LM", "DeepSpeed", "torchtitan", "MaxText", "Colossal-AI")
FEATURES = re.compile(r"^\| feature \| here .*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| \n").split(" | ")]


@pytest.mark.slow
def test_the_example_runs_and_learns(tmp_path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    losses = re.findall(r"^  loss: (\S+)$", done.stdout, re.MULTILINE)
    assert [float(loss) < 4 for loss in losses] == [True]
    assert "def " in done.stdout
    *_, evaluation, verdict = done.stdout.splitlines()
    assert evaluation.startswith("{'validation_loss': ")
    assert verdict.startswith("equal to one device in float32")
    assert (tmp_path / "runs" / "readme" / "config.yaml").is_file()


def test_the_example_is_short() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 12


def test_every_command_and_file_it_names_exists() -> None:
    for module in set(re.findall(r"python -m jaxptd\.(\w+)", README)):
        home = ROOT / "jaxptd" / module
        assert home.with_suffix(".py").exists() or (home / "__main__.py").exists(), module
    for path in set(re.findall(r"`?((?:jaxptd|configs|docs)/[\w./-]+\.\w+)`?", README)):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (train|test|docs)", README)):
        assert f"\n{target}:" in makefile


def fenced(text: str, kind: str) -> str:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return "".join(block for each, block in found if each == kind)


def test_its_commands_are_accepted(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    found = list(command_lines(fenced(README, "")))
    for name, options in found:
        accept(name, options)
    assert {name for name, _ in found} == {"verify", "plan", "train", "chat"}


def test_the_page_of_commands_has_them_all() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    found = {name for name, _ in command_lines(fenced(page, "sh"))}
    assert found == {command.name for command in COMMANDS}


# ---- figures ------------------------------------------------------------------------------------


def results() -> list[list[str]]:
    table = README.partition("| what | result | page |\n")[2].partition("\n\n")[0]
    return [cells(line) for line in table.splitlines()[1:]]


@pytest.mark.parametrize("row", results(), ids=lambda row: row[0])
def test_figures_are_those_of_the_page(row: list[str]) -> None:
    what, result, link = row
    (path,) = re.findall(r"\((docs/\w+\.md)\)", link)
    page = " ".join((ROOT / path).read_text().split())
    quoted = re.findall(r"\*\*(.*?)\*\*", result)
    figures = re.findall(r"\d[\d.,%e-]*(?<![.,-])", result) + re.findall(r"[\d,]+(?=B| H200)", what)
    wanted = [*figures, *quoted]
    assert wanted
    for figure in wanted:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", page), f"{figure} in {path}"


def test_the_plan_is_that_of_the_page() -> None:
    """Compares line by line, without the last columns."""
    page = (ROOT / "docs" / "planning.md").read_text().splitlines()
    block = README[README.index("512 x h200") :].partition("\n```")[0].splitlines()
    assert len(block) == 3
    for line in block:
        assert any(each.startswith(line) for each in page), line


def test_the_table_of_features_is_that_of_the_page() -> None:
    (here,), (there,) = FEATURES.findall(README), FEATURES.findall(COMPARISON)
    assert here == re.sub(r"\]\((\w+\.md)\)", r"](docs/\1)", there)


def section(name: str) -> str:
    """The comparison's text below a heading of level 3."""
    return re.split(r"\n##+ ", COMPARISON.partition(f"### {name}\n")[2])[0]


def sources(name: str) -> list[list[str]]:
    return [cells(row) for row in section(name).splitlines() if row[:2] == "| "][1:]


def test_each_feature_is_sourced_where_it_is_claimed() -> None:
    """A library's table lists a source exactly where the matrix says yes, no or partly."""
    lines = [cells(line) for line in FEATURES.findall(COMPARISON)[0].splitlines()]
    assert {claim for line in lines for claim in line[2:]} == {"yes", "no", "partly", "not found"}
    for column, library in enumerate(LIBRARIES, start=2):
        sourced = {name for row in sources(library) for name in row[0].split(", ")}
        for feature, words in zip((line[0] for line in lines), SOURCED, strict=True):
            claim = next(line for line in lines if line[0] == feature)[column]
            assert (words in sourced) == (claim != "not found"), f"{library}: {feature}"


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_source_says_which_commit_was_read_and_when_it_was_checked(library: str) -> None:
    commit, date = re.findall(r"[Rr]ead at commit `(\w{12})` of (\d+ \w+ 2026)", section(library))[
        0
    ]
    read = datetime.strptime(date, "%d %B %Y").date()
    assert f"/{commit}/" in section(library)
    assert "*not found*" in section(library)  # with what was searched for
    for *_, checked in sources(library):
        assert read <= datetime.strptime(checked, "%Y-%m-%d").date() <= datetime.now().date()


# Names of the features in the tables of sources, in the order of the matrix.
SOURCED = (
    "tensor parallel",
    "context parallel",
    "2D tensor parallel",
    "parameters sharded",
    "zero-bubble",
    "your own pipeline schedule",
    "host memory",
    "another layout",
    "compared with one device",
    "bytes that a step sends",
    "compiled for devices you don't have",
    "cost model",
    "mixture of experts",
    "speeds",
)


# ---- pictures -----------------------------------------------------------------------------------


def words(path: Path) -> list[str]:
    texts = (each for each in ElementTree.parse(path).iter() if each.tag.endswith("}text"))
    return ["".join(each.itertext()).strip() for each in texts]


def test_its_pictures_are_those_of_its_commands(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"`jaxptd (\w+) ([^`]*--picture [^`]*)`", README)
    shown = re.findall(r"!\[[^]]+\]\((docs/pictures/[\w.-]+)\)", README)
    for (name, options), picture in zip(commands, shown, strict=True):
        find_command(name).load().main(shlex.split(options))
        made = tmp_path / options.split("--picture ")[1]
        assert words(made) == words(ROOT / picture)
    assert len(shown) == 1
