"""What a step must move, by formula: by tensor and data parallelism, grids, ZeRO, pipelines."""

from jaxptd.analysis.traffic.step import expected

__all__ = ["expected"]
