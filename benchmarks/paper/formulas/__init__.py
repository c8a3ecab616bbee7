"""Formulas, lists and sizes of the sources, held against this library's programs."""
