"""The README's example runs unchanged, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs_and_learns() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loss, verdict = done.stdout.splitlines()
    assert float(loss.removeprefix("loss ")) < 3
    assert verdict.startswith("equal to one device in float32")


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
