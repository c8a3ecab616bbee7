"""The peak memory of a device in a training step, predicted: what lives at the fullest moment."""

from jaxptd.analysis.peak.model import Peak, peak
from jaxptd.analysis.peak.outside import OUTSIDE, outside

__all__ = ["OUTSIDE", "Peak", "outside", "peak"]
