"""`--run-dir` of commands that take a config."""

import pytest

from jaxptd.commands.run_options import read_run, run_parser
from jaxptd.errors import UserError


def read(*argv: str, new: bool = False):
    return read_run(run_parser("prog", "what it does", examples=()), argv, new=new)[0]


@pytest.fixture
def run(tmp_path):
    """Directory of a run."""
    (tmp_path / "run").mkdir()
    text = "train: {steps: 7, run_dir: elsewhere}\nlayout: {dp: 2}\n"
    (tmp_path / "run" / "config.yaml").write_text(text)
    return str(tmp_path / "run")


@pytest.mark.parametrize("spaced", [True, False])
def test_it_names_the_config_and_the_directory_of_a_run(run, spaced):
    config = read(*(["--run-dir", run] if spaced else [f"--run-dir={run}"]))
    assert (config.train.steps, config.layout.dp, config.train.run_dir) == (7, 2, run)


def test_options_override_it_wherever_it_stands(run):
    for argv in (["--train.steps=8", "--run-dir", run], ["--run-dir", run, "--train.steps=8"]):
        assert read(*argv).train.steps == 8


def test_a_config_is_trained_in_the_directory(run):
    config = read("--run-dir", run, "--config", "quickstart", new=True)
    assert (config.train.steps, config.train.run_dir) == (1200, run)
    with pytest.raises(UserError, match="both name a config; give one of them"):
        read("--run-dir", run, "--config=quickstart")


def test_one_directory_only(run):
    for other in (["--run-dir", "b"], ["--train.run_dir", "b"], ["--train.run_dir=b"]):
        for argv in (["--run-dir", run, *other], [*other, f"--run-dir={run}"]):
            with pytest.raises(UserError, match="--run-dir is given twice; give it once"):
                read(*argv, new=True)


def test_a_new_run_needs_no_directory_yet_but_a_config(tmp_path):
    place = str(tmp_path / "new")
    found = read("--run-dir", place, "--config", "quickstart", new=True)
    assert found.train.run_dir == place
    with pytest.raises(UserError, match=r"name the directory of a run, or add --config or --from"):
        read("--run-dir", place, new=True)
    with pytest.raises(
        UserError, match=r"new holds no run: .*config.yaml does not exist; name the"
    ):
        read("--run-dir", place)
    assert list(tmp_path.iterdir()) == []


def test_home_is_written_out(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("--run-dir", "~/run").train.run_dir == run


@pytest.mark.parametrize("argv", [["--run-dir"], ["--run-dir", ""], ["--run-dir", "a\0b"]])
def test_no_path(argv):
    with pytest.raises(UserError, match="--run-dir"):
        read(*argv)
