"""Hugging Face weights, in and out: parameters and gradients under their names and shapes."""

from jaxptd.hf.directory import Directory, is_directory
from jaxptd.hf.mapping import names
