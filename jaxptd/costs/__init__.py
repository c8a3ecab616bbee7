"""The units of a part's costs: bytes sent, bytes saved for backward, seconds on a device.

`collective` defines the kinds of collectives and adds them up, `kept` the tensors saved for
backward; `terms` and `kernels` give seconds of kernels and messages, `program` describes a
program's kernels.
Imports no jax.
"""
