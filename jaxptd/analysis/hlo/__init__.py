"""Reads the text of compiled programs: collectives, kernels, and what runs beside a collective."""

from jaxptd.analysis.hlo.collectives import collectives_from_hlo
