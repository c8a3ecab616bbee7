"""Losses of small models that are trained on both layouts of the paper: figures 8 to 10."""
