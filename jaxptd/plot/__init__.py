"""Figures."""


def __getattr__(name: str) -> object:
    raise AttributeError(f"module 'jaxptd.plot' has no attribute {name!r}")
