"""Compiles training steps for GPUs that are not there: their memory, kernels and schedule.

`absent.py` makes the GPUs, `candidate.py` reads what `jaxptd plan --compile` asks of a step.
"""
