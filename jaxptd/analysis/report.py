"""Writes Markdown tables of results, and the versions that they were measured with."""

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Formats a Markdown table; the first row is the header."""
    head, *body = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def versions(*packages: str) -> str:
    """The date, the machine and versions, for the top of a file of results."""
    named_versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", *packages)
    ]
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    return f"{date}; Python {platform.python_version()}, {', '.join(named_versions)}; {machine}."
