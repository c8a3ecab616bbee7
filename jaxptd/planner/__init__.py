"""Predicts the time of a training step from its layout, before a GPU is rented. Imports no jax.

`cost` has the model: kernels, collectives, and a step as a sum of named terms. It takes a list of
collectives, whoever made it. `own` describes this library's steps to it, with the formulas for
traffic and memory; `search` finds the fastest layouts, and `planning` is what `jaxptd plan` prints.
`published` has rows of papers, records of what their programs did, and the comparison of
predictions with them: `jaxptd plan validate`.
"""
