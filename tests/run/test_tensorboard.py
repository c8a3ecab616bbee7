"""TensorBoard's events of a run's metrics."""

import importlib.util
import struct
from pathlib import Path

import pytest

from jaxptd.config.command_line import load_config
from jaxptd.errors import UserError
from jaxptd.run.folder import RunDir

CONFIG = Path(__file__).parents[2] / "configs" / "test-tiny.yaml"


def row(step: int, **more: float) -> dict:
    return {"step": step, "loss": 1.0 / step, "mfu": None, **more}


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run")


def events(folder: Path) -> list:
    """The events in the files of a folder: a record is length u64, CRC u32, data, CRC u32."""
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
    run_dir.log(row(5, validation_loss=2.0))
    version, start, *values = events(run_dir.path / "tensorboard")
    assert version.file_version == "brain.Event:2"
    assert (start.session_log.status, start.step) == (1, 5)  # START: later steps are hidden
    found = [(v.summary.value[0].tag, v.summary.value[0].simple_value, v.step) for v in values]
    assert found == [("loss", pytest.approx(0.2), 5), ("validation_loss", 2.0, 5)]  # no mfu


def test_without_tensorboardx_there_is_no_file_for_it(run_dir, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run_dir.open(load_config(CONFIG), step=0)
    run_dir.log(row(1))
    assert not (run_dir.path / "tensorboard").exists()


def test_a_full_disk_ends_the_run_with_a_line(run_dir, monkeypatch):
    run_dir.open(load_config(CONFIG), step=0)
    plain = Path.open

    def full(self, *args):
        if self.parent.name == "tensorboard":
            raise OSError(28, "No space left on device")
        return plain(self, *args)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(UserError, match="No space left on device; use a directory"):
        run_dir.log(row(1))
