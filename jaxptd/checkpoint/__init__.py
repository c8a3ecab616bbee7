"""Checkpoints that any layout and number of processes can restore."""

from jaxptd.checkpoint.checkpoints import Checkpoints, read_description, restore_path
from jaxptd.checkpoint.manifest import VALIDATION_LOSS, CheckpointError

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "VALIDATION_LOSS",
    "read_description",
    "restore_path",
]
