"""Reads the text of compiled programs: collectives, kernels, and how these overlap."""

from jaxptd.analysis.hlo.collectives import collectives_from_hlo
