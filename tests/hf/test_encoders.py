"""Losses and gradients of encoders equal those of transformers in float64.

The default tests read transformers' results from golden files; the slow ones run transformers
itself, on every kind of layout.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hugging import encoders, write_directory
from hugging.compared import check_golden, compare
from turns import slow

from jaxptd import Layout

TESTS = Path(__file__).parents[1]
LAYOUTS = [
    Layout(),
    Layout(dp=2, tp=2, sequence_parallel=True),
    Layout(cp=2, ring="blockwise"),
    Layout(row=2, col=2),
    Layout(row=2, col=2, attention2d="blocks"),
    Layout(pp=2, schedule="interleaved", virtual_stages=2),
    Layout(pp=4, schedule="zb-v"),
    Layout(dp=4, zero=2),
    Layout(dp=4, zero=3),
    Layout(pp=2, cp=2, tp=2, sequence_parallel=True, schedule="interleaved", virtual_stages=2),
]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("t5", Layout()),
        slow("bert", Layout(cp=2, tp=2, sequence_parallel=True, ring="blockwise")),
        slow("t5", Layout(cp=2, tp=2, sequence_parallel=True, ring="blockwise")),
        slow("t5-1.1", Layout()),
    ],
    ids=str,
)
def test_numbers_are_those_of_transformers(tmp_path: Path, name: str, layout: Layout) -> None:
    tensors, config = encoders.TINY[name]
    folder = write_directory(tmp_path / name, tensors(), base=config, shards=2)
    check_golden(name, TESTS / "golden" / f"{name}.json", folder, layout)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each model, written by transformers."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    found = {name: tmp_path_factory.mktemp("hf") / name for name in encoders.REFERENCES}
    for name, folder in found.items():
        encoders.make(encoders.REFERENCES[name], folder)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", encoders.REFERENCES)
def test_transformers_itself_agrees(folders, name: str, layout: Layout) -> None:
    compare(name, folders[name], layout)


MANY = """
import jax, pathlib, sys
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
from hugging.compared import compare
from jaxptd import Layout
schedule = {"schedule": "interleaved", "virtual_stages": 2}
for name, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    layout = Layout(pp=2, dp=2, cp=2, tp=2, sequence_parallel=True, zero=2, **schedule)
    compare(name, pathlib.Path(folder), layout)
    layout = Layout(pp=2, dp=2, row=2, col=2, attention2d="blocks", schedule="zb-v", zero=1)
    compare(name, pathlib.Path(folder), layout)
print("held")
"""


@pytest.mark.slow
def test_all_engines_together_on_sixteen_devices(folders) -> None:
    """Runs in a process with 16 devices."""
    own = (str(TESTS / "helpers"), str(TESTS.parent), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(own)}
    pairs = [str(each) for pair in folders.items() for each in pair]
    command = [sys.executable, "-c", MANY, *pairs]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "held\n", done.stderr
