"""Pipeline parallelism: the model's layers are split into stages, and micro-batches flow through.

Schedules, in pure numpy: table.py has a schedule, its check and its file; schedules.py those with a
name; statistics.py their bubble, memory and messages; picture.py and `jaxptd pipeline`
draw them. plan.py assigns slots to a schedule's values, with hops.py for the messages between
stages and placement.py for the layers of each part.

Running a plan: model.py is the model as functions and arrays; executor.py has the loop over ticks
and the forward pass, training.py F, B and W. split_backward.py splits a layer's backward into B
and W with programs.py, layer_kinds.py does so for each kind of layer, and pools.py has the pools of
slots.
"""
