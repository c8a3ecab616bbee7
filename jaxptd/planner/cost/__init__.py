"""The cost model: seconds of a training step as a sum of named terms.

description.py has what a step is made of: sizes of the model, the layout, what the program does,
and the time of a schedule. kernels.py has the seconds of one product, one pass over memory, one
collective; layer.py the terms of a layer and of the rest; and step.py adds all up. collectives.py
is the seam: a step takes a list of `Placed` collectives.
"""

from jaxptd.planner.cost.collectives import Placed
from jaxptd.planner.cost.description import Implementation, Parallelism, StepDescription
from jaxptd.planner.cost.step import StepTime, step_time
from jaxptd.planner.cost.terms import Term

__all__ = [
    "Implementation",
    "Parallelism",
    "Placed",
    "StepDescription",
    "StepTime",
    "Term",
    "step_time",
]
