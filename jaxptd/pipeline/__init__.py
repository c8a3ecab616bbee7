"""Pipeline parallelism: the model's layers are cut into stages, micro-batches flow through them.

table.py: a schedule, its check and its file. schedules.py: those with a name. statistics.py:
bubble, memory and messages of one. picture.py draws one; so does `python -m jaxptd.pipeline`.

plan.py: where a schedule's values wait, hops.py: how they go from stage to stage, placement.py:
where layers lie. executor.py runs a plan on a mesh; halves.py takes a layer's backward pass apart,
pools.py keeps what waits.
"""
