"""Mistakes as data: each changes one place of the code, and tests or detectors must notice."""
