"""Measures, bounds and draws the times of a training step's parts."""
