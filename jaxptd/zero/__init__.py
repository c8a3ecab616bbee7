"""ZeRO: parameters, gradients and optimizer state sharded over data parallel devices.

plan.py is what formulas read, without jax; zero.py shards the state, and adds up gradients;
shards.py has the shards, and gathers the parameters of a layer while it runs; loop.py runs the
layers of a stack, and in a loop gathers one beside others.
"""
