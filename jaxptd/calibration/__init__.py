"""`jaxptd plan calibrate`: times kernels and collectives here, and derives a hardware table.

`suite.py` defines and chooses the samples to time, each with its time by the planner's cost model.
`timer.py` runs them with JAX. `report.py` solves the cost model for the shares of the hardware's
limits that were reached, and writes them as YAML.
"""
