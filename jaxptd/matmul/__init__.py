"""Products of matrices that are sharded over a grid or a ring of devices."""
