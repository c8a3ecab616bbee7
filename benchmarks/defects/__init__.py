"""Defects as data: each a patch of one line, and the detectors that find it."""
