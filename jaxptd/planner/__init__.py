"""Predicts the time of a training step from its layout, before a GPU is rented. Imports no jax.

`cost` is the model: kernels, collectives, and a step as a sum of named terms. It takes a list of
collectives from any source. `steps` describes this library's steps to it, with the formulas for
traffic and memory. `search` finds the fastest layouts, which `planning` ranks for `jaxptd plan`.
`programs` records what published programs did, `rows` reads their measured steps, and `validation`
compares predictions with them for `jaxptd plan validate`. `frameworks` finds the fastest layouts of
other frameworks and writes them in their words, for `jaxptd plan --print`.
"""
