"""Pipeline parallelism: stages of the model's layers, through which micro-batches flow.

Schedules, in pure numpy: table.py defines a schedule, its check and its file; schedules.py makes
the named ones; statistics.py computes bubble, memory and messages; picture.py and `jaxptd pipeline`
draw them. plan.py assigns slots to a schedule's values, and messages between stages; placement.py
assigns layers to parts.

Running a plan: executor.py loops over ticks and runs the forward pass; training.py runs F, B and W.
split_backward.py splits a layer's backward into B and W, which training.py does for each kind of
layer. pools.py holds the model as functions and arrays, and the pools of slots.
"""
