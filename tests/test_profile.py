"""The command that measures the time of a step's parts."""

import re
import sys
from pathlib import Path

import pytest

from jaxptd import profile
from jaxptd.analysis.hlo.kernels import COLLECTIVE, OTHER, PRODUCT
from jaxptd.errors import UserError

CONFIG = str(Path(__file__).parents[1] / "configs" / "test-tiny.yaml")
SMALL = ["--model.num_layers", "1", "--model.dropout", "0", "--train.micro_batches", "1"]


def test_a_profile_of_this_machine(capsys, tmp_path: Path) -> None:
    drawn = tmp_path / "step.svg"
    command = ["--config", CONFIG, "--steps", "2", "--layout.tp", "2", *SMALL]
    command += ["--picture", str(drawn)]
    assert profile.main([*command, "--trace", str(tmp_path / "trace")]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| (\w+) \| ([\w ]+) \| ([\d.e-]+) \| ([\d.]+)% \|$", printed, re.M)
    assert {("mlp", PRODUCT), ("attention", COLLECTIVE), ("optimizer", OTHER)} <= {
        (scope, kind) for scope, kind, _, _ in rows
    }
    assert sum(float(share) for *_, share in rows) == pytest.approx(100, abs=1)
    assert "ms per step, measured" in drawn.read_text()
    assert list((tmp_path / "trace").glob("**/*.trace.json.gz"))
    with pytest.raises(UserError, match="already exists; name a new directory"):
        profile.main([*command, "--trace", str(tmp_path / "trace")])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], "--steps=0 must be at least 1"),
        (["--steps", "1001"], "--steps=1001 must be at least 1 and at most 1000"),
        (["--picture", "step.pdf"], "picture step.pdf: use a name that ends in .png or .svg"),
        (["--trace", "/dev/null/trace"], "--trace=/dev/null/trace: Not a directory; name a dir"),
        (["--picture", "/dev/null/step.svg"], "--picture /dev/null/step.svg: cannot write in /dev"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        profile.main(["--config", CONFIG, *options])


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "jaxptd.plot.style", raising=False)
    monkeypatch.setattr(profile, "measure", None)
    with pytest.raises(
        UserError, match=r"a picture needs matplotlib; .*pip install -e '\.\[viz\]'"
    ):
        profile.main(["--config", CONFIG, "--picture", "step.svg"])
