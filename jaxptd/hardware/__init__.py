"""Limits of accelerators and of the links between them, each number with its source.

`accelerators.yaml` has the numbers; table.py reads it, or a file of a person's own in the same
form; topology.py says which links a group of devices uses.
"""

from jaxptd.hardware.table import Accelerator, Figure, accelerators, find_accelerator
from jaxptd.hardware.topology import Cluster, Group

__all__ = ["Accelerator", "Cluster", "Figure", "Group", "accelerators", "find_accelerator"]
