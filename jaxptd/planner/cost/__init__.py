"""The time of a step as a sum of named terms, of any program's step.

description.py has a step to predict, and the time of a schedule; layer.py the terms of a layer and
of the rest; and step.py adds all up. collectives.py is the seam: a step takes a list of `Placed`
collectives. What a kernel or a message takes, and what a program does, is in `jaxptd.costs`.
"""

from jaxptd.planner.cost.collectives import Placed
from jaxptd.planner.cost.description import StepDescription
from jaxptd.planner.cost.step import StepTime, step_time

__all__ = ["Placed", "StepDescription", "StepTime", "step_time"]
