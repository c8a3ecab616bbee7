"""ZeRO: parameters, gradients and optimizer state sharded over data-parallel devices.

plan.py is what formulas read, without jax; shards.py has the shards that a state holds; zero.py
gathers parameters and adds up gradients in a step; loop.py runs the layers of a stack, and in a
loop gathers one while others compute.
"""
