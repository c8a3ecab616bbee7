"""Bugs as data: each changes one place in the code, and tests or detectors must notice."""
