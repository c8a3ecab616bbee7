"""Limits of accelerators and of the links between them, each number with its source.

`accelerators.yaml` has the numbers; table.py reads it, or your own file in the same form, and
determines which links a group of devices uses.
"""

from jaxptd.hardware.table import (
    Accelerator,
    Cluster,
    Figure,
    Group,
    Links,
    accelerators,
    find_accelerator,
)
