"""The parts that models are made of: descriptions, parameters and costs.

A *part* is a description without arrays: `MLPShape`, `AttentionShape`, ... It declares the layer in
`jaxptd/layers/`, and its methods are the formulas for bytes sent, bytes saved for backward, and
seconds. `comms`, `memory`, the peak and `plan` only add up over parts: none asks what a part is.
`part.py` defines the methods; `mlp.py` is the shortest part. Imports no jax: `jaxptd plan` starts
in a third of the time that importing jax and flax takes.
"""
