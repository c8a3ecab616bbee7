"""Optimizers that look at whole matrices, of which a device holds blocks or shards.

moments.py is what every optimizer keeps, as shapes: formulas read it, without jax.
"""
