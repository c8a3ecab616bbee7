"""The defects, by the part of the code that they are in."""

from benchmarks.defects.rows.attention import ATTENTION
from benchmarks.defects.rows.collectives import COLLECTIVES
from benchmarks.defects.rows.grids import GRIDS
from benchmarks.defects.rows.models import MODELS
from benchmarks.defects.rows.pipelines import PIPELINES
from benchmarks.defects.rows.runs import RUNS
from benchmarks.defects.rows.sizes import SIZES
from benchmarks.defects.rows.steps import STEPS
from benchmarks.defects.rows.zero import ZERO

ALL = (
    *COLLECTIVES,
    *ATTENTION,
    *GRIDS,
    *MODELS,
    *SIZES,
    *STEPS,
    *ZERO,
    *PIPELINES,
    *RUNS,
)

__all__ = ["ALL"]
