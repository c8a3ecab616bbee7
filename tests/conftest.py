"""What all tests of the package have in common."""

from shared_steps import shared_steps

__all__ = ["shared_steps"]
