"""Matmuls of matrices sharded over a grid or a ring of devices."""
