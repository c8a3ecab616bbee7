"""A machine without the CUDA plugin is told what to install."""

import pytest

from benchmarks.lib import gpus
from jaxptd.errors import UserError


def test_missing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: object) -> None:
        raise RuntimeError("no\nplugin")

    monkeypatch.setattr(gpus.topologies, "get_topology_desc", missing)
    with pytest.raises(UserError, match="no CUDA compiler here \\(no plugin\\); pip install"):
        gpus.gpus(8)
