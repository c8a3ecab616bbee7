"""A machine without the CUDA plugin is told what to install."""

import pytest

from jaxptd import compiling as absent
from jaxptd.errors import UserError


def test_missing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: object) -> None:
        raise RuntimeError("no\nplugin")

    monkeypatch.setattr(absent.topologies, "get_topology_desc", missing)
    with pytest.raises(
        UserError, match="the CUDA compiler is missing \\(no plugin\\); .*pip install"
    ):
        absent.gpus(8)


def test_memory_is_that_of_the_accelerator() -> None:
    assert "device_memory_size: 151397597184\n" in absent.hardware()
    assert "device_memory_size: 85900000000\n" in absent.hardware(85_900_000_000)
