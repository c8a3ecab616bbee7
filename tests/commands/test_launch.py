"""`jaxptd launch`: how a run goes on after a death, and how many processes it starts."""

import pytest

from jaxptd.commands import launch
from jaxptd.commands.command_line import load_config
from jaxptd.errors import UserError


def config(*overrides: str):
    return load_config("test-tiny", [f"--{each}" for each in overrides])


@pytest.mark.parametrize(
    ("resume", "saved", "option"),
    [
        ("auto", False, []),
        ("auto", True, []),
        ("never", False, ["--checkpoint.resume=auto"]),
        ("best", True, ["--checkpoint.resume=auto"]),
        ("runs/other/checkpoints/00000100", True, ["--checkpoint.resume=auto"]),
        ("runs/other/checkpoints/00000100", False, []),  # it begins there again
    ],
)
def test_after_a_death_it_resumes_whatever_it_began_with(tmp_path, resume, saved, option):
    (tmp_path / "checkpoints" / (f"{100:08d}" if saved else ".00000100.partial")).mkdir(
        parents=True
    )
    given = config(f"train.run_dir={tmp_path}", f"checkpoint.resume={resume}")
    assert launch._resume(given) == option


def test_as_many_processes_start_as_a_file_says(tmp_path):
    available = tmp_path / "available"
    available.write_text("8\n")
    elastic = config("layout.dp=8", "train.micro_batches=1", "processes.elastic=[2,8]")
    count = launch._counted(elastic, 4, available)
    for text, expected in (("8", 4), ("3", 2), ("2", 2), ("1", 0), ("", 0), ("4", 4)):
        available.write_text(text)  # an empty file is being written: the last number counts
        assert count() == expected
    assert launch._counted(elastic, 4, None)() == 4


@pytest.mark.parametrize("text", ["", "two", "-1", "1.5", "9" * 1000])
def test_a_file_without_a_number_is_refused(tmp_path, text):
    available = tmp_path / "available"
    available.write_text(text)
    with pytest.raises(UserError, match="write the number of processes into it"):
        launch._counted(config("layout.dp=2", "processes.elastic=[1,2]"), 2, available)
