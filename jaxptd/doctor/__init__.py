"""Checks of `jaxptd doctor`: the machine, its packages, devices, processes and file systems."""
