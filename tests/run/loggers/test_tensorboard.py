"""TensorBoard events with a run's metrics."""

import importlib.util
import struct
from pathlib import Path

import pytest

from jaxptd.commands.command_line import load_config
from jaxptd.run.folder import RunDir

CONFIG = Path(__file__).parents[3] / "configs" / "test-tiny.yaml"


def row(step: int, **more: float) -> dict:
    return {"step": step, "loss": 1.0 / step, "mfu": None, **more}


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run")


def events(folder: Path) -> list:
    """Events in the files of a folder; a record is length u64, CRC u32, data, CRC u32."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            size, crc = struct.unpack("<QI", data[:12])
            assert crc == masked_crc32c(data[:8])
            assert struct.unpack("<I", data[12 + size : 16 + size])[0] == masked_crc32c(
                data[12 : 12 + size]
            )
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def test_tensorboard_gets_every_number_of_a_row(run_dir):
    run_dir.open(load_config(CONFIG), step=4)
    run_dir.log(row(5, **{"expert_load/0": 1.5, "validation_loss": 2.0}))
    version, start, _, *values = events(run_dir.path / "tensorboard")
    assert version.file_version == "brain.Event:2"
    assert (start.session_log.status, start.step) == (1, 5)  # START: later steps are hidden
    found = [(v.summary.value[0].tag, v.summary.value[0].simple_value, v.step) for v in values]
    assert found == [
        ("loss", pytest.approx(0.2), 5),
        ("expert_load/0", 1.5, 5),
        ("validation_loss", 2.0, 5),
    ]  # no mfu


def test_the_events_begin_with_the_config_as_a_text(run_dir):
    config = load_config(CONFIG)
    run_dir.open(config, step=4)
    _, _, event = events(run_dir.path / "tensorboard")
    (value,) = event.summary.value
    assert (value.metadata.plugin_data.plugin_name, event.step) == ("text", 5)
    (text,) = value.tensor.string_val
    # Markdown shows lines indented by four as code
    lines = text.decode().splitlines()
    assert all(line.startswith("    ") for line in lines)
    path = run_dir.path / "text.yaml"
    path.write_text("\n".join(line[4:] for line in lines))
    assert load_config(path) == config


def test_without_tensorboardx_there_is_no_file_for_it(run_dir, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run_dir.open(load_config(CONFIG), step=0)
    run_dir.log(row(1))
    assert not (run_dir.path / "tensorboard").exists()


def full_for_tensorboard(monkeypatch) -> None:
    plain = Path.open

    def full(self, *args, **options):
        if self.parent.name == "tensorboard":
            raise OSError(28, "No space left on device")
        return plain(self, *args, **options)

    monkeypatch.setattr(Path, "open", full)


def test_a_full_disk_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch):
    lines = []
    run_dir = RunDir(tmp_path / "run", say=lines.append)
    run_dir.open(load_config(CONFIG), step=0)
    before = events(run_dir.path / "tensorboard")
    with monkeypatch.context() as patch:
        full_for_tensorboard(patch)
        run_dir.log(row(1))
        run_dir.log(row(2))
    folder = run_dir.path / "tensorboard"
    assert lines == [f"warning: cannot write {folder}: No space left on device; the run continues"]
    assert events(folder) == before
    run_dir.log(row(3))
    assert [each.step for each in events(folder)[len(before) :]] == [3]
    assert run_dir.metrics() == [row(1), row(2), row(3)]


@pytest.mark.parametrize("broken", ["disk", "a file in the way", "library"])
def test_a_run_begins_without_events_that_cannot_be_written(tmp_path, monkeypatch, broken):
    def raises(name):
        raise TypeError("Descriptors cannot be created directly")

    if broken == "disk":
        full_for_tensorboard(monkeypatch)
    elif broken == "library":
        monkeypatch.setattr(importlib.util, "find_spec", raises)
    else:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "tensorboard").write_text("a file")
    lines = []
    run_dir = RunDir(tmp_path / "run", say=lines.append)
    run_dir.open(load_config(CONFIG), step=0)
    run_dir.log(row(1))
    assert len(lines) == 1
    assert lines[0].startswith("warning: this run logs nothing to tensorboard: ")
    assert run_dir.metrics() == [row(1)]
