"""The time of any program's step as a sum of named terms.

description.py describes a step to predict, and times a schedule. layer.py has the terms of a layer
and of the rest, and step.py adds all up. collectives.py is the interface: a step takes a list of
`Placed` collectives. `jaxptd.costs` times kernels and messages, and describes programs.
"""

from jaxptd.planner.cost.collectives import Placed
from jaxptd.planner.cost.description import StepDescription
from jaxptd.planner.cost.step import StepTime, step_time

__all__ = ["Placed", "StepDescription", "StepTime", "step_time"]
