"""A training run around its program: directory, data, checkpoints, progress, health, devices."""
