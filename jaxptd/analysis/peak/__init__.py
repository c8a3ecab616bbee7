"""The peak memory of a device in a training step, predicted: what lives at the fullest moment."""

from jaxptd.analysis.peak.model import OUTSIDE, Peak, outside, peak

__all__ = ["OUTSIDE", "Peak", "outside", "peak"]
