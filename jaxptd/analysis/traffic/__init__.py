"""Predicts the collectives of a training step from its config."""

from jaxptd.analysis.traffic.step import Part, expected, parts

__all__ = ["Part", "expected", "parts"]
