"""Checkpoints that any layout and number of processes can restore."""

from jaxptd.checkpoint.checkpoints import (
    VALIDATION_LOSS,
    Checkpoints,
    read_description,
    restore_path,
)
from jaxptd.checkpoint.manifest import CheckpointError

__all__ = [
    "VALIDATION_LOSS",
    "CheckpointError",
    "Checkpoints",
    "read_description",
    "restore_path",
]
