"""`train.profile` traces exactly the requested steps of a run."""

import gzip
import json
import re
from pathlib import Path

import jax
import pytest
from runs import Trainer

QUICK = (
    *("--train.steps=4", "--checkpoint.every=2", "--train.eval_every=0"),
    *("--optimizer.decay_steps=12", "--train.profile=[2,3]"),
)


@pytest.fixture
def train(tmp_path, capfd):
    return Trainer(tmp_path, capfd)


def losses(train: Trainer) -> list[float]:
    return [row["loss"] for row in train.run_dir.metrics()]


def traced_steps(train: Trainer) -> list[int]:
    """Steps in a run's traces, as annotations that XProf and Perfetto show."""
    found = []
    for path in sorted((train.run_dir.path / "profile").glob("**/*.trace.json.gz")):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        steps = [each["args"]["step_num"] for each in events if each.get("name") == "train"]
        found += sorted({int(step) for step in steps})
    return found


@pytest.mark.slow
def test_the_steps_of_the_window_are_traced(train) -> None:
    outcome = train(*QUICK)
    assert outcome.code == 0, outcome.err
    folder = train.run_dir.path / "profile"
    line = f"the trace of steps 2 to 3 is in {folder}\n"
    lines = outcome.out.partition(line)
    assert re.findall(r"^step +(\d+)", lines[0], re.M) == ["1", "2", "3"]
    assert re.findall(r"^step +(\d+)", lines[2], re.M) == ["4"]
    assert traced_steps(train) == [2, 3]
    assert list(folder.glob("**/*.xplane.pb"))  # for TensorBoard


@pytest.mark.slow
def test_profiling_changes_no_number_and_is_done_once(train, tmp_path, capfd) -> None:
    assert train(*QUICK).code == 0
    folder = train.run_dir.path / "profile"
    plain = Trainer(tmp_path / "plain", capfd)
    plain.folder.mkdir()
    assert plain(*QUICK, "--train.profile=null").code == 0
    assert losses(train) == losses(plain)
    before = sorted(folder.rglob("*"))
    again = train(*QUICK, "--train.steps=6")
    assert "resuming at step 4" in again.out  # past the window
    assert "trace" not in again.out
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_a_run_that_resumes_within_the_window_traces_its_rest(train) -> None:
    assert train(*QUICK, "--train.steps=2", "--train.profile=[1,1]").code == 0
    outcome = train(*QUICK, "--train.profile=[2,3]")
    assert "the trace of steps 3 to 3 is in" in outcome.out
    assert traced_steps(train) == [1, 3]


@pytest.mark.slow
def test_a_profiler_that_is_busy_does_not_end_the_run(train, tmp_path) -> None:
    with jax.profiler.trace(str(tmp_path / "mine")):
        outcome = train(*QUICK)
    assert outcome.code == 0
    assert re.search(r"warning: no trace in \S+/profile: .*[Oo]nly one profil", outcome.out)
    assert len(train.run_dir.metrics()) == 4
    assert list(Path(tmp_path / "mine").rglob("*.xplane.pb"))


@pytest.mark.parametrize("window", ["[3]", "[3,2]", "[0,1]", "[2,99]", "[a,b]"])
def test_a_bad_window_is_refused_before_anything_is_written(train, window) -> None:
    assert "train.profile" in train.refused(f"--train.profile={window}")
    assert not train.run_dir.path.exists()
