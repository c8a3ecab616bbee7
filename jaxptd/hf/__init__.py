"""Reads and writes Hugging Face weights: parameters and gradients by their names and shapes."""

from jaxptd.hf.directory import Directory, is_directory
from jaxptd.hf.mapping import names
