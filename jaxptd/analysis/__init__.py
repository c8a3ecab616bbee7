"""Analyses programs: communication, memory and FLOPs, counted in them and predicted by formula."""
