"""Kernels in Pallas for Triton, where XLA's move more, or move it slower. For NVIDIA GPUs.

Each is a plain formula elsewhere, too, which any device can run; `model.kernels` chooses.
"""
