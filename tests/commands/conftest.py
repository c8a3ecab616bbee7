"""A config file that a test writes."""

import pytest


@pytest.fixture
def write(tmp_path):
    """Writes a config file; returns its path."""

    def write(content: str | bytes) -> str:
        path = tmp_path / "run.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write
