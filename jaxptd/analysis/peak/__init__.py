"""Predicts a device's peak memory in a training step: what is alive at the fullest moment."""

from jaxptd.analysis.peak.model import OUTSIDE, Peak, outside, peak

__all__ = ["OUTSIDE", "Peak", "outside", "peak"]
