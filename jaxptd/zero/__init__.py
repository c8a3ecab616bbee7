"""ZeRO: parameters, gradients and optimizer state sharded over data parallel devices.

shapes.py is what formulas read, without jax; zero.py shards the state, with the shards of
shards.py; gathering.py gathers the parameters of a layer while it runs.
"""
