"""Options that mean the same in every command."""

import argparse
import sys
from pathlib import Path

import pytest

from jaxptd.commands.run_options import add_config, named_config
from jaxptd.common_options import as_path, path_option, picture_path
from jaxptd.errors import Parser, UserError


def args(*argv: str) -> argparse.Namespace:
    parser = Parser(prog="prog")
    add_config(parser)
    return parser.parse_args(argv)


def test_a_path_begins_at_home_and_is_a_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert as_path("~/runs/a") == path_option("~/runs/a") == Path("/home/someone/runs/a")
    assert as_path("a b") == Path("a b")


@pytest.mark.parametrize("text", ["", "a\0b", "~nobody-of-this-name/x"])
def test_no_path(text):
    with pytest.raises(
        UserError, match=r"name a file or directory|write the path out|null byte; remove it"
    ):
        as_path(text)
    with pytest.raises(argparse.ArgumentTypeError):
        path_option(text)


def test_a_config_is_named_by_its_file_or_by_a_run(tmp_path):
    (tmp_path / "config.yaml").write_text("train: {steps: 7}\n")
    assert named_config(args()) is None
    assert named_config(args("--config", "quickstart")).layout.dp == 2
    assert named_config(args("--run-dir", str(tmp_path))).train.steps == 7
    for both in (("--config", "quickstart", "--run-dir", str(tmp_path)),):
        with pytest.raises(UserError, match="give one of them"):
            named_config(args(*both))


def test_a_picture_is_checked_before_it_is_drawn(tmp_path, monkeypatch):
    assert picture_path(None) is None
    for name in ("a.png", "a.SVG"):
        assert picture_path(str(tmp_path / name)) == tmp_path / name
    for name, words in (("a.pdf", ".png or .svg"), ("no/a.svg", "a folder that exists")):
        with pytest.raises(UserError, match=words):
            picture_path(str(tmp_path / name))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "jaxptd.plot.style", raising=False)
    with pytest.raises(UserError, match=r"pip install -e '\.\[viz\]'"):
        picture_path(str(tmp_path / "a.png"))
    assert list(tmp_path.iterdir()) == []
