"""The README's example runs unchanged, and its commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


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
    assert (tmp_path / "runs" / "readme" / "loss.svg").is_file()


def test_the_example_is_short() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 28


def test_every_command_and_file_it_names_exists() -> None:
    for module in set(re.findall(r"python -m jaxptd\.(\w+)", README)):
        home = ROOT / "jaxptd" / module
        assert home.with_suffix(".py").exists() or (home / "__main__.py").exists(), module
    for path in set(re.findall(r"`?((?:jaxptd|configs|docs)/[\w./-]+\.\w+)`?", README)):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (train|test|docs)", README)):
        assert f"\n{target}:" in makefile
