"""Predicts the collectives of a training step from its config."""

from jaxptd.analysis.traffic.step import expected

__all__ = ["expected"]
