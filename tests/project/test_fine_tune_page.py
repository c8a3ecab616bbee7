"""The fine-tuning page: its commands run, and transformers reads the files that they write."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxptd.run.folder import RunDir

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "fine_tune.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, flags=re.S | re.M)


@pytest.mark.slow
def test_the_page_trains_a_model_that_transformers_reads(tmp_path: Path) -> None:
    commands, data, (theirs, _) = blocks("sh"), blocks("python"), blocks("py")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "jaxptd"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jaxptd "$@"\n')
    command.chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }

    def run(*argv: str) -> str:
        ended = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    outputs = []
    for number, block in enumerate(commands):
        outputs.append(run("bash", "-ec", block))
        if number == 0:
            run(sys.executable, "-c", "".join(data))
    assert outputs[0].endswith("verdict: can be trained and generated from\n")
    losses = [row["loss"] for row in RunDir(tmp_path / "runs" / "tuned").metrics()]
    assert losses[-1] < losses[0] / 2
    preferred = RunDir(tmp_path / "runs" / "preferred").metrics()
    assert preferred[-1]["validation_accuracy"] > 0.6
    question, _, answer = outputs[2].partition("<|assistant|>\n")
    assert "os.getcwd" in question and answer.strip()
    files = {path.name for path in (tmp_path / "models" / "tuned").iterdir()}
    base = {path.name for path in (tmp_path / "models" / "tiny").iterdir()}
    assert files == base
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
        assert run(sys.executable, "-c", theirs).partition("do?")[2].split() == answer.split()
