"""ZeRO: parameters, gradients and optimizer state sharded over data parallel devices.

plan.py is what formulas read, without jax; zero.py shards the state, with the shards of shards.py,
and adds up gradients; gathering.py gathers the parameters of a layer while it runs, prefetching.py
in a loop beside others.
"""
