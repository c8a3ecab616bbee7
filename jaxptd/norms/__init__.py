"""Norms in kernels of their own."""
