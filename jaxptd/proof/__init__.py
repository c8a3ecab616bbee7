"""Proof by many configurations that nobody chose: drawn, compared with one device, minimised."""
