"""Measures the progress of a run and shows it: a line on a terminal, rows elsewhere."""
