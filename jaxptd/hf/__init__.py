"""Hugging Face weights, in and out: parameters and gradients under their names and shapes."""
