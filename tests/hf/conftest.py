"""A directory of a tiny GPT-2."""

from pathlib import Path

import numpy as np
import pytest
from hugging import gpt2_tensors, write_directory


@pytest.fixture(scope="package")
def tensors() -> dict[str, np.ndarray]:
    return gpt2_tensors()


@pytest.fixture(scope="package")
def gpt2(tmp_path_factory: pytest.TempPathFactory, tensors) -> Path:
    """A directory with three shards and an index."""
    return write_directory(tmp_path_factory.mktemp("hf") / "gpt2", tensors, shards=3)
