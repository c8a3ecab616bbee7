"""Products of matrices whose blocks lie on a grid or around a ring of devices."""
