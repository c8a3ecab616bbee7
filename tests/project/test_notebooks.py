"""Notebooks run, use only public names, and tell readers what they will learn."""

import ast
import asyncio
import copy
import json
import os
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import pytest

import jaxptd

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"), key=lambda path: int(path.stem.split("_")[0]))
# Modules with fixed paths, whose `__all__` is public in addition to what `import jaxptd` exports.
MODULES = ("jaxptd.ring_attention", "jaxptd.summa2d")
# Sizes that keep each at half a minute on two cores; a timed limit would depend on the machine.
MOST = {"steps": 150, "num_layers": 5, "hidden_size": 64, "seq_length": 1024}

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def names_used(source: str) -> set[tuple[str, str]]:
    """(module, name) of everything that code uses from jaxptd."""
    tree = ast.parse(source)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxptd"):
            found |= {(node.module or "", alias.name) for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names if alias.name.startswith("jaxptd.")}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {("jaxptd", node.attr)} if node.value.id == "jaxptd" else set()
    return found


def is_public(module: str, name: str) -> bool:
    """True for a name in the package's stable API."""
    if module in MODULES:
        return name in __import__(module, fromlist=["__all__"]).__all__
    return module == "jaxptd" and name in (*jaxptd.__all__, "__path__")


@each
def test_a_notebook_uses_public_names_only(path: Path) -> None:
    used = names_used(path.read_text(encoding="utf-8"))
    assert used
    assert [pair for pair in used if not is_public(*pair)] == []


def test_a_private_name_is_found() -> None:
    source = "import jaxptd.layers\nfrom jaxptd.step import Program\njaxptd.resolved"
    assert not any(is_public(*pair) for pair in names_used(source))
    assert len(names_used(source)) == 3


@each
def test_a_notebook_opens_with_what_one_will_know(path: Path) -> None:
    first, second, *_ = jupytext.read(path).cells
    number = path.stem.partition("_")[0]
    assert first.cell_type == "markdown" and first.source.startswith(f"# {number}. ")
    assert "you will know" in first.source
    assert second.cell_type == "code"


@each
def test_a_notebook_trains_little(path: Path) -> None:
    assert [
        pair for pair in sizes(path.read_text(encoding="utf-8")) if pair[1] > MOST[pair[0]]
    ] == []


def sizes(source: str) -> list[tuple[str, int]]:
    """(field, value) of each size in a config that `MOST` limits."""
    given = [word for node in ast.walk(ast.parse(source)) for word in getattr(node, "keywords", [])]
    return [
        (word.arg, word.value.value)
        for word in given
        if word.arg in MOST and isinstance(word.value, ast.Constant)
    ]


def test_a_notebook_that_trains_much_is_found() -> None:
    assert sizes("Config(ModelConfig(num_layers=9), train=TrainConfig(steps=151))") == [
        ("num_layers", 9),
        ("steps", 151),
    ]
    assert ("steps", MOST["steps"]) in sizes((ROOT / "notebooks" / "1_quickstart.py").read_text())


def test_each_notebook_leads_to_the_next() -> None:
    links = [re.findall(r"\]\((\w+\.py)\)", path.read_text(encoding="utf-8")) for path in NOTEBOOKS]
    assert [name for found in links for name in found] == [path.name for path in NOTEBOOKS[1:]]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Any]]:
    """All executed notebooks by name, run in parallel on all cores."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(os.cpu_count()) as pool:
        patch.setenv("PYTHONPATH", path)
        return {
            each.stem: pool.submit(run, each, tmp_path_factory.mktemp(each.stem))
            for each in NOTEBOOKS
        }


def run(path: Path, folder: Path) -> Any:
    """A notebook with the output of its cells, run in the folder."""
    return execute(jupytext.read(path), folder)


def execute(notebook: Any, folder: Path) -> Any:
    where = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where)
    return asyncio.run(client.async_execute())  # `execute` leaves its event loop open


# ---- a changed cell that is run again ----------------------------------------------------------

CHANGES = {  # notebook -> (text of a cell, a reader's change)
    "1_quickstart": ("hidden_size=64", "hidden_size=32"),
    "2_tensor_parallelism": ("hidden_size=32", "hidden_size=64"),
    "5_pipelines": ("hidden_size=32", "hidden_size=64"),
    "9_experts": ("hidden_size=64", "hidden_size=32"),
    "10_fine_tuning": ('lora={"rank": 8}', 'lora={"rank": 4}'),
    "7_hugging_face": ('.parent / "examples"', '.parents[0] / "examples"'),  # from the model on
}
STEPS = re.compile(r"\bsteps=\d+")


def with_a_change(path: Path, old: str, new: str) -> Any:
    """Runs a notebook with short runs, then again from the changed cell on, as a reader would."""
    notebook = jupytext.read(path)
    for cell in notebook.cells:
        cell.source = STEPS.sub("steps=2", cell.source)
    first = next(i for i, cell in enumerate(notebook.cells) if old in cell.source)
    again = copy.deepcopy(notebook.cells[first:])
    again[0].source = again[0].source.replace(old, new)
    notebook.cells += again
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    return notebook


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_cell_runs_again(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    notebook = with_a_change(ROOT / "notebooks" / f"{name}.py", *CHANGES[name])
    execute(notebook, tmp_path)


def test_a_notebook_that_trains_begins_anew() -> None:
    """A reader's changed cell would otherwise find the previous run and directories."""
    made, removed = set(), set()
    for name in CHANGES:
        text = (ROOT / "notebooks" / f"{name}.py").read_text(encoding="utf-8")
        written = r'run_dir="([^"]+)"|^# !.*(?:--out|tiny_model\.py"?) (\S+)'
        made |= {a or b for a, b in re.findall(written, text, re.M)}
        removed |= set(re.findall(r'^shutil\.rmtree\("([^"]+)", ignore_errors=True\)$', text, re.M))
    assert len(made) > len(CHANGES) and made == removed


@pytest.mark.slow
def test_the_fine_tune_of_a_notebook_gets_better(executed: dict[str, Future[Any]]) -> None:
    """Held-out loss falls in a whole run, and the exported directory reproduces it."""
    shown = [
        output.get("text", "")
        for cell in executed["7_hugging_face"].result().cells
        for output in cell.get("outputs", ())
    ]
    text = "".join(shown)
    ((before, after),) = re.findall(r"text: ([\d.]+) before, ([\d.]+) after", text)
    assert float(after) < float(before) - 1
    ((run, again),) = re.findall(r"([\d.]+) in the run, ([\d.]+) read back", text)
    assert abs(float(run) - float(again)) < 1e-4


# ---- whole notebooks ----------------------------------------------------------------------------


@pytest.mark.slow
def test_make_writes_a_notebook_with_its_output(tmp_path: Path) -> None:
    (line,) = re.findall(r"^\t\$\(BIN\)/jupytext (.*) notebooks/\*\.py$", MAKEFILE, flags=re.M)
    header = NOTEBOOKS[0].read_text(encoding="utf-8").partition("\n\n")[0]  # names its kernel
    (tmp_path / "one.py").write_text(f"{header}\n\n# %%\nprint(6 * 7)\n")
    command = [sys.executable, "-m", "jupytext", *line.split(), "one.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads((tmp_path / "one.ipynb").read_text())["cells"]
    assert "".join(cell["outputs"][0]["text"]) == "42\n"


@pytest.mark.slow
@each
def test_a_notebook_runs(path: Path, executed: dict[str, Future[Any]]) -> None:
    notebook = executed[path.stem].result()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [output for cell in code for output in cell.outputs]
    assert shown and not any(
        output.get("name") == "stderr" and "rror" in output.text for output in shown
    )
