"""`jaxptd plan calibrate`: times kernels and collectives here, and derives a hardware table.

`samples.py` has the kinds of things that are timed, each with its time by the planner's cost model;
`suite.py` chooses them. `programs.py` and `timer.py` run them with JAX. `shares.py` solves the cost
model for the shares of the hardware's limits, and `report.py` writes them as YAML.
"""
