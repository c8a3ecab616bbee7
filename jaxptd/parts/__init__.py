"""The parts that models are made of: their descriptions, parameters, and all that they cost.

A *part* is a description without arrays: `MLPShape`, `AttentionShape`, ... The layer in
`jaxptd/layers/` is declared from it, and formulas for bytes sent, bytes kept and seconds are its
methods. `comms`, `memory`, the peak and `plan` only add up over parts: none asks what a part is.
`part.py` has the methods, `mlp.py` is the shortest part. Imports no jax: `jaxptd plan` starts in a
third of the time that importing jax and flax takes.
"""
