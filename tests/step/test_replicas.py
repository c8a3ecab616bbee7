"""Checksums of copies of a state: equal on every layout, and a flipped bit changes them."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny
from faults import with_a_flipped_bit
from turns import slow

from jaxptd.config import Config, TrainConfig
from jaxptd.errors import UserError
from jaxptd.layout import Layout
from jaxptd.mesh import make_mesh
from jaxptd.run.recheck import require_copies
from jaxptd.step import Program
from jaxptd.step.replicas import Difference, checksum, checksums, difference, has_copies


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int8"])
def test_one_flipped_bit_changes_a_checksum(dtype) -> None:
    x = np.asarray(jax.numpy.linspace(-100, 100, 33).astype(dtype)).reshape(3, 11)
    before = checksum(x)
    for bit in range(8 * x.itemsize):
        raw = bytearray(x.tobytes())
        raw[x.itemsize * 5 + bit // 8] ^= 1 << bit % 8
        assert checksum(np.frombuffer(bytes(raw), x.dtype).reshape(3, 11)) != before


LAYOUTS = [
    (Layout(dp=4), {}),
    slow(Layout(dp=2, tp=2, sequence_parallel=True), {}),
    slow(Layout(dp=2, tp=2, zero=3), {}),
    slow(Layout(replicas=2, dp=2, zero=3), {}),
    slow(Layout(replicas=2, dp=2, tp=2, zero=3, replica_state="split"), {}),
    slow(Layout(pp=2, dp=2), {}),
    slow(Layout(row=2, col=2, dp=2), {}),
    slow(Layout(dp=2, cp=2), {"optimizer": "adafactor"}),
    slow(Layout(dp=2, ep=2, tp=2), tiny.MOE),
]


@pytest.mark.parametrize(("layout", "choices"), LAYOUTS, ids=str)
def test_copies_agree_after_steps_and_a_flipped_bit_is_found(layout, choices) -> None:
    program = tiny.program(layout, **choices)
    state = program.init_state()
    for seed in range(2):
        state, _ = program.train_step(state, tiny.batch(seed))
    sums = jax.device_get(checksums(program)(state))
    assert {x.shape for x in sums.values()} == {(layout.num_devices,)}
    assert difference(sums, program.mesh) is None
    free = {a for a, n in program.mesh.shape.items() if n > 1}
    places = [x for x in program.states.stored if free - program.states.stored[x].axes]
    assert places
    device = program.mesh.devices.flat[-1]
    for where in ("params", "optimizer"):
        changed = corrupted(state, where, places[-1], device.id)
        found = difference(jax.device_get(checksums(program)(changed)), program.mesh)
        assert found is not None
        assert device in found.odd
        assert found.is_clear == (found.copies > 2)
        assert found.is_clear == (found.odd == (device,))


def corrupted(state: dict, where: str, name: str, device: int) -> dict:
    """The state with a flipped bit in a parameter, or in its first moment, on one device."""
    flip = functools.partial(with_a_flipped_bit, device=device)
    if where == "params":
        return {**state, "params": {**state["params"], name: flip(state["params"][name])}}
    flat, tree = jax.tree_util.tree_flatten_with_path(state["optimizer"])
    places = [index for index, (path, x) in enumerate(flat) if name in str(path) and x.size > 1]
    leaves = [flip(x) if index == places[0] else x for index, (_, x) in enumerate(flat)]
    return {**state, "optimizer": jax.tree.unflatten(tree, leaves)}


def test_which_devices_are_named() -> None:
    devices = np.array([SimpleNamespace(id=n, process_index=n // 4) for n in range(8)])
    mesh = SimpleNamespace(axis_names=("dp", "tp"), devices=devices.reshape(4, 2))

    def found(key: str, values: list[int]) -> tuple[list[int], bool] | None:
        each = difference({key: np.array(values)}, mesh)
        return None if each is None else ([d.id for d in each.odd], each.is_clear)

    assert found("tp", [1, 2] * 4) is None
    assert found("", [1, 2] * 4) == ([0, 1, 2, 3, 4, 5, 6, 7], False)
    assert found("tp", [1, 2, 1, 2, 1, 9, 1, 2]) == ([5], True)
    assert found("tp", [1, 2, 1, 9, 1, 9, 1, 2]) == ([1, 3, 5, 7], False)
    assert found("dp", [1, 1, 2, 2, 3, 4, 5, 5]) == ([4, 5], False)
    assert found("dp tp", list(range(8))) is None
    clear = Difference((SimpleNamespace(id=9, process_index=3),), 4)
    assert str(clear) == "device 9 of process 3, unlike 3 others with the same copy"


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        (Layout(), False),
        (Layout(dp=2), True),
        (Layout(dp=4, zero=3), False),
        (Layout(dp=2, tp=2, zero=1), True),
        (Layout(replicas=2, dp=2, zero=3), True),
        (Layout(replicas=2, dp=2, zero=3, replica_state="split"), False),
    ],
)
def test_a_layout_without_copies_is_refused(layout, copies) -> None:
    config = Config(tiny.MODEL, layout, train=TrainConfig(check_steps="replicas"))
    program = Program(config, make_mesh(layout))
    assert has_copies(program) == copies
    if copies:
        require_copies(program)
    else:
        with pytest.raises(UserError, match="no two devices hold copies"):
            require_copies(program)
