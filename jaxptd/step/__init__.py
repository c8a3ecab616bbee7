"""The training step of any layout, and the state it updates."""

from jaxptd.step.batch import Batch, batch_fields
from jaxptd.step.program import Metrics, Program
from jaxptd.step.state import State

__all__ = [
    "Batch",
    "Metrics",
    "Program",
    "State",
    "batch_fields",
]
