"""Pallas kernels (Triton, NVIDIA GPUs) where XLA's move more data, or move it slower.

Each also exists elsewhere as a plain formula for any device; `model.kernels` chooses.
"""
