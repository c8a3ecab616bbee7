"""Predicts the collectives of a training step from its config."""

from jaxptd.analysis.traffic.step import StepPart, expected, parts

__all__ = ["StepPart", "expected", "parts"]
