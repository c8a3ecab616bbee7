"""What a run has besides its program: directory, checkpoints, progress, devices."""
