"""The units of what a part costs: bytes sent, bytes kept, seconds on a device.

`collective` has the kinds of collectives and their sums, `kept` what backward keeps, `terms` and
`kernels` the seconds of kernels and messages, `program` what a program's kernels do.
Imports no jax.
"""
