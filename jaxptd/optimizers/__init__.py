"""Optimizers that look at whole matrices, of which a device holds blocks or shards."""

from jaxptd.optimizers.adafactor import Factors, factors, scale_by_factors
from jaxptd.optimizers.muon import is_orthogonalised, scale_by_orthogonal

__all__ = ["Factors", "factors", "is_orthogonalised", "scale_by_factors", "scale_by_orthogonal"]
