"""Pipeline parallelism: the model's layers are split into stages, and micro-batches flow through.

Schedules, in pure numpy: table.py has a schedule, its check and its file; schedules.py those with a
name; statistics.py their bubble, memory and messages; picture.py and `jaxptd pipeline`
draw them. plan.py assigns slots to a schedule's values, and the messages between stages;
placement.py has the layers of each part.

Running a plan: executor.py has the loop over ticks and the forward pass, training.py F, B and W.
split_backward.py splits a layer's backward into B and W, and training.py does so for each kind of
layer. pools.py has the model as functions and arrays, and the pools of slots.
"""
