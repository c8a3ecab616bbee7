"""Predicts the time of a training step from its layout, before a GPU is rented. Imports no jax.

`cost` has the model: kernels, collectives, and a step as a sum of named terms. It takes a list of
collectives, whoever made it. `steps` describes this library's steps to it, with the formulas for
traffic and memory; `search` finds the fastest layouts, and `planning` is what `jaxptd plan` prints.
`programs` has records of what published programs did, `rows` reads their measured steps, and
`validation` compares predictions with them: `jaxptd plan validate`.
"""
