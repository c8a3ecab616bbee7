"""The chains whose waits are timed: all compute the same, and XLA knows the length of none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import waits
from benchmarks.gpu.waits import WAYS
from jaxptd.analysis.hlo.timeline import host_waits
from jaxptd.errors import UserError


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LENGTH", 3)


def test_all_chains_compute_the_same() -> None:
    x, number = jnp.eye(8), jnp.int32(3)
    want, *others = (np.asarray(way(x, number)) for way in WAYS.values())
    for other in others:
        np.testing.assert_array_equal(other, want)
    assert want[0, 0] != 1


def test_the_chains_wait_as_often_as_their_names_say() -> None:
    x, number = jnp.eye(8), jnp.int32(3)
    texts = [jax.jit(way).lower(x, number).compile().as_text() for way in WAYS.values()]
    # A loop waits before each trip and after the last; one of unknown length counts as one trip.
    assert [host_waits(text) for text in texts] == [0, 3, 2, 6]


def test_it_needs_a_gpu() -> None:
    with pytest.raises(UserError, match="JAX finds no GPU"):
        waits.main([])
