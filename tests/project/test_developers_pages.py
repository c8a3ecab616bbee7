"""Developers' pages: paths and commands exist, and the map lists every folder of the package."""

import importlib.util
import re
from pathlib import Path

import pytest
from command_lines import accept, command_lines

import jaxptd

ROOT = Path(__file__).parents[2]
PAGES = ("AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md")
AGENTS, CONTRIBUTING, CHANGELOG = ((ROOT / name).read_text(encoding="utf-8") for name in PAGES)
FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"(?<![\w./])(?:jaxptd|tests|benchmarks|docs|examples|configs|\.ci)/[\w./-]*\w/?")
PLACEHOLDER = re.compile(r"NAME|FOLDER|SUBJECT")
MAP = CONTRIBUTING.partition("```\njaxptd/\n")[2].partition("\n```")[0]


def paths(text: str) -> set[str]:
    return {path for path in PATH.findall(text) if not PLACEHOLDER.search(path)}


def missing(text: str) -> list[str]:
    return sorted(path for path in paths(text) if not (ROOT / path).exists())


def modules(text: str) -> set[str]:
    """Names after `python -m`."""
    return set(re.findall(r"python -m ((?:jaxptd|benchmarks|pytest|sphinx)[\w.]*\w)", text))


@pytest.mark.parametrize("text", [AGENTS, CONTRIBUTING], ids=PAGES[:2])
def test_paths_are_there(text: str) -> None:
    assert missing(text) == []
    assert len(paths(text)) > 30


@pytest.mark.parametrize("text", [AGENTS, CONTRIBUTING], ids=PAGES[:2])
def test_commands_are_there(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"(?<![\w-])make ([a-z]+)", "\n".join(commands(text)))
    assert [target for target in targets if f"\n{target}: " not in makefile] == []
    named = {name for name in modules(text) if not PLACEHOLDER.search(name)}
    assert [name for name in sorted(named) if importlib.util.find_spec(name) is None] == []
    fenced = "".join(FENCED.findall(text)).replace(".venv/bin/python", "python")
    for name, options in command_lines(fenced):
        accept(name, options)


def commands(text: str) -> list[str]:
    """Lines of fenced blocks, and text in backticks."""
    outside = FENCED.sub("", text)
    return [*"".join(FENCED.findall(text)).splitlines(), *re.findall(r"`([^`\n]+)`", outside)]


def test_the_short_form_is_short_and_linked() -> None:
    assert AGENTS.count("\n") <= 100
    assert "](AGENTS.md)" in CONTRIBUTING
    assert "](CONTRIBUTING.md)" in AGENTS


def test_the_tests_of_a_minute_hold_the_laws() -> None:
    (line,) = re.findall(r"^.*python -m pytest -q -n 2 ((?:.*\\\n)*.*)$", AGENTS, re.MULTILINE)
    chosen = set(line.replace("\\\n", " ").split())
    assert {f"tests/project/test_{name}.py" for name in ("limits", "vma", "imports")} <= chosen


def test_the_map_has_all_that_is_at_the_top_of_the_package() -> None:
    package = ROOT / "jaxptd"
    here = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    here |= {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    # the first words of a line, before two spaces and the description
    heads = [re.split(r" {3,}(?=[a-z`])", line.strip())[0] for line in MAP.splitlines()]
    named = {word for head in heads for word in head.split() if re.fullmatch(r"\w+(\.py|/)", word)}
    outside = {"tests/", "benchmarks/", "configs/", "examples/", "docs/"}
    assert named - outside == here
    assert outside <= named


def test_files_of_the_reading_order_are_there() -> None:
    order = CONTRIBUTING.partition("## Reading order\n")[2].partition("\n## ")[0]
    known = {path.name for path in (ROOT / "jaxptd").rglob("*.py")}
    named = set(re.findall(r"`(?:\w+/)*(\w+\.py)`", order))
    assert named - known == set()
    assert len(named) > 40


def test_the_changelog_has_a_line_for_each_feature_of_this_version() -> None:
    version = jaxptd.__version__.partition(".dev")[0]
    first = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)[0]
    assert first.startswith(version)
    entries = CHANGELOG.partition(f"## {first}\n")[2].partition("\n## ")[0].split("\n- ")[1:]
    assert 30 <= len(entries) <= 50
    assert [entry for entry in entries if "\n" in entry.partition("\n\n")[0].rstrip("\n")] == []
    assert [entry for entry in entries if "](docs/" not in entry] == []


# --- The finders


def test_paths_that_are_not_there_are_found() -> None:
    text = "`jaxptd/no.py`, `tests/FOLDER/x.py`, jaxptd/config/, `docs/index.md`, a/docs/x"
    assert missing(text) == ["jaxptd/no.py"]
    assert paths(text) == {"jaxptd/no.py", "jaxptd/config/", "docs/index.md"}
