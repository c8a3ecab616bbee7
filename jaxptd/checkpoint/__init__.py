"""Checkpoints that any layout and any number of processes can restore."""

from jaxptd.checkpoint.checkpoints import VALIDATION_LOSS, Checkpoints
from jaxptd.checkpoint.folders import CheckpointError
from jaxptd.checkpoint.saving import (
    check_part,
    check_whole,
    load_part,
    read_description,
    read_tensors,
    restore_part,
    restore_path,
)
