"""Draws random configurations, compares each with one device, and minimises any failure."""
