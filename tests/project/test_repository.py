"""Files for hosts and tools of a repository: metadata, templates, hooks, the workflow."""

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
HOST = "github.com/jaxptd"
TEXT = (".py", ".md", ".yml", ".yaml", ".toml", ".cff", ".sh", ".sbatch")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_the_citation_is_that_of_the_package() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["authors"] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"]
    assert PROJECT["description"].lower() in citation["title"].lower()
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_only_pyproject_and_pages_that_install_name_the_host_of_the_repository() -> None:
    assert all(HOST in url for url in PROJECT["urls"].values())
    folders = ("jaxptd", "docs", "examples", ".github", "configs", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    paths = [path for path in (*ROOT.iterdir(), *paths) if path.suffix in TEXT]
    naming = [path.name for path in paths if HOST in path.read_text(encoding="utf-8")]
    assert sorted(naming) == ["README.md", "grouped_matmul.md", "pyproject.toml", "quickstart.md"]


def test_who_lands_on_the_quickstart_clones_and_installs_as_the_readme_says() -> None:
    """Both pages give the same commands, the same time, and a link to the metadata's address."""
    readme, page = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/quickstart.md")
    )
    for text in (readme, page):
        assert f"\ngit clone {PROJECT['urls']['Source']}\ncd jaxptd\n" in text
        assert "\nmake train\n" in text


def test_the_minutes_of_the_first_run_are_the_same_wherever_they_are_said() -> None:
    config = (ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8")
    (duration,) = re.findall(r"; (\w+ to \w+ minutes on two cores)\.$", config, re.M)
    for name in ("README.md", "docs/quickstart.md", "docs/index.md"):
        words = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert set(re.findall(r"\w+ to \w+ minutes on two cores", words)) == {duration}, name


def test_the_classifiers_are_the_versions_that_ci_tests() -> None:
    found = {c.rpartition(":: ")[2] for c in PROJECT["classifiers"] if ":: Python :: 3." in c}
    steps = read(GITHUB / "workflows" / "ci.yml")["jobs"]["run"]["steps"]
    (installed,) = [s["with"]["python-version"] for s in steps if "python-version" in str(s)]
    assert set(installed.split()) == found
    assert PROJECT["requires-python"] == f">={min(found)}"


def test_the_workflow_runs_what_a_person_runs() -> None:
    workflow = read(GITHUB / "workflows" / "ci.yml")
    assert workflow["permissions"] == {"contents": "read"}
    commands = [s["run"] for s in workflow["jobs"]["run"]["steps"] if "run" in s]
    assert commands == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")]).returncode == 0


def test_hooks_call_targets_of_make() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"  # nothing is downloaded
    for hook in repository["hooks"]:
        assert {"id", "name", "entry", "language"} <= set(hook)
        for target in re.findall(r"^make .*?(\w+)$", hook["entry"]):
            assert f"\n{target}: " in MAKEFILE


@pytest.mark.parametrize("path", sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml")), ids=lambda p: p.name)
def test_a_form_for_issues_has_what_its_host_asks_for(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    for item in form["body"]:
        assert item["type"] in ("textarea", "input", "dropdown", "checkboxes", "markdown")
        assert {"label"} <= set(item["attributes"])
    assert any(item["validations"]["required"] for item in form["body"] if "validations" in item)


def test_the_template_of_a_change_names_files_that_are_there() -> None:
    text = (GITHUB / "PULL_REQUEST_TEMPLATE.md").read_text()
    for path in re.findall(r"`([\w./]+)`", text):
        assert (ROOT / path).exists(), path
