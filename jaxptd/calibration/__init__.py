"""`jaxptd plan calibrate`: times kernels and collectives here, and derives a hardware table.

`suite.py` has the kinds of things that are timed, each with its time by the planner's cost model,
and chooses them. `timer.py` runs them with JAX. `report.py` solves the cost model for the shares of
the hardware's limits, and writes them as YAML.
"""
