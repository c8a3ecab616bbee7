"""Wheel and source distribution contain the right files, and an installed copy can train.

The wheel is unzipped, which is all that installing pure Python does.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
GENERATED = {"__pycache__", "_build"}
# Packages that the extras install, by their import names.
OF_EXTRAS = ["matplotlib", "PIL", "pyarrow", "zstandard", "tensorboardX", "tokenizers"]
OF_EXTRAS += ["safetensors", "lm_eval", "torch"]


def build(builder: type, root: Path, into: Path) -> Path:
    (path,) = builder(str(root)).build(directory=str(into), versions=["standard"])
    return Path(path)


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def files_of(*folders: str) -> set[str]:
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in found if not GENERATED & set(path.parts)}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unzipped wheel."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(build(WheelBuilder, ROOT, tmp_path_factory.mktemp("wheel"))) as wheel:
        wheel.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked folder of the source distribution."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(build(SdistBuilder, ROOT, tmp_path_factory.mktemp("sdist"))) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


def test_the_wheel_is_the_package_and_the_configs(installed: Path) -> None:
    found = {name for name in names(installed) if ".dist-info/" not in name}
    assert found == files_of("jaxptd") | {f"jaxptd/{name}" for name in files_of("configs")}
    for name in files_of("configs"):
        assert (installed / "jaxptd" / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_source_distribution_has_all_that_tests_and_documentation_read(unpacked: Path) -> None:
    folders = ("jaxptd", "configs", "tests", "docs", "benchmarks", "examples", "notebooks")
    folders += (".ci", ".github")
    top = {"pyproject.toml", "conftest.py", "Makefile", "LICENSE", ".gitignore", "PKG-INFO"}
    top |= {"CITATION.cff", ".pre-commit-config.yaml"}
    pages = {"AGENTS.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
    assert names(unpacked) == files_of(*folders) | top | pages


def test_a_wheel_of_the_source_distribution_is_that_of_the_checkout(
    installed: Path, unpacked: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(build(WheelBuilder, unpacked, tmp_path)) as wheel:
        assert set(wheel.namelist()) == names(installed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["jaxptd.mesh", "--world-size", "8"],
        ["jaxptd.train", "--config", "test-tiny", "--train.steps", "2"],
        ["jaxptd.comms", "--config", "test-dp2-tp4"],
    ],
    ids=lambda command: command[0],
)
def test_commands_of_the_wheel_run_in_an_empty_directory(
    installed: Path, tmp_path: Path, command: list[str]
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    where = "import jaxptd; print(jaxptd.__file__)"
    for argv in (["-c", where], ["-m", *command]):
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        if argv[0] == "-c":
            assert Path(done.stdout.strip()).is_relative_to(installed)


def test_without_any_extra_every_command_can_be_imported() -> None:
    """An option that needs an extra names it in a line; nothing else may fail."""
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({OF_EXTRAS}))\n"
        "from jaxptd.commands.table import COMMANDS, LATER, later\n"
        "for command in COMMANDS: command.load()\n"
        "for name in LATER: later(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
