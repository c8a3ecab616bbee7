"""Conversion between canonical and stored form, bit for bit; no device holds a whole array."""

import dataclasses
import functools
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpointing import run_python
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.checkpoint import conversion
from jaxptd.checkpoint.canonical import canonical_form
from jaxptd.mesh import Layout, make_mesh
from jaxptd.params import ParamInfo, Stored
from jaxptd.zero.shards import ShardedInfo


def info(shape: tuple, held: tuple, *spec: Any, rows: tuple[int, ...] | None = None) -> ParamInfo:
    return ParamInfo(shape, held, spec, decay=True, stack="blocks" if rows else None, rows=rows)


def layers(shape: tuple, held: tuple, *spec: Any) -> ParamInfo:
    """Returns a stack in the order of its layers."""
    return dataclasses.replace(info(shape, held, *spec), stack="blocks")


def sharded(info: ParamInfo, layout: Layout, *, lead: int = 0) -> ShardedInfo:
    return ShardedInfo(info, layout.sizes, lead)


# Five layers in the rows of two stages: in order, and folded as in zb-v.
UNEVEN = info((5, 3, 7), (6, 3, 8), "pp", None, "tp", rows=(0, 1, 2, 3, 4))
FOLDED = info((5, 11, 4, 6), (8, 12, 4, 6), "pp", "tp", None, None, rows=(0, 6, 2, 3, 4))
EVEN = info((4, 6), (4, 6), "pp", None, rows=(0, 3, 1, 2))
PP, PP_DP = Layout(pp=2, tp=2), Layout(pp=2, dp=2, tp=2)
GRID, ZERO_GRID = Layout(row=2, col=2), Layout(dp=2, row=2, col=2)
# What the state holds, the layout, and how the canonical form is sharded.
CASES: list[tuple[Stored, Layout, tuple]] = [
    (info((13, 6), (16, 6), "tp", None), Layout(tp=4), (None, None)),
    (info((13, 8), (16, 8), "tp", None), Layout(tp=4), (None, "tp")),
    (info((13,), (16,), ("row", "col")), GRID, (None,)),
    (info((7, 8), (8, 8), "row", "col"), GRID, (None, ("col", "row"))),
    (UNEVEN, PP, (None, None, None)),
    (FOLDED, PP, (None, None, "tp", "pp")),
    (FOLDED, PP, (None, None, ("pp", "tp"), None)),
    (EVEN, Layout(pp=2), ("pp", None)),
    (EVEN, Layout(pp=2), (None, "pp")),
    (sharded(info((7,), (7,), None), Layout(dp=4)), Layout(dp=4), (None,)),
    (sharded(info((8,), (8,), None), Layout(dp=4)), Layout(dp=4), ("dp",)),
    (
        sharded(info((13, 6), (16, 6), "tp", None), Layout(dp=2, tp=4)),
        Layout(dp=2, tp=4),
        (None, "dp"),
    ),
    (sharded(info((7, 5), (8, 6), "row", "col"), ZERO_GRID), ZERO_GRID, (None, None)),
    (
        sharded(layers((3, 8, 7), (3, 8, 7), None, "tp", None), Layout(dp=2, tp=2)),
        Layout(dp=2, tp=2),
        (None, ("tp", "dp"), None),
    ),
    (
        sharded(layers((3, 5, 7), (3, 6, 7), None, "tp", None), Layout(ep=3, tp=2)),
        Layout(ep=3, tp=2),
        ("ep", None, None),
    ),
    (
        sharded(layers((6, 5), (6, 5), "pp", None), Layout(pp=2, ep=2, cp=2)),
        Layout(pp=2, ep=2, cp=2),
        ("pp", None),
    ),
    (sharded(layers((6,), (6,), None), Layout(dp=4)), Layout(dp=4), (None,)),
    (sharded(UNEVEN, PP_DP), PP_DP, (None, None, None)),
    (sharded(UNEVEN, PP_DP, lead=1), PP_DP, (None, None, None)),
    (sharded(FOLDED, PP_DP), PP_DP, (None, None, ("tp", "dp"), "pp")),
    (sharded(FOLDED, PP_DP, lead=1), PP_DP, (None, None, ("tp", "pp"), "dp")),
    (
        sharded(layers((2, 5, 3), (2, 5, 3), None, None, None), Layout(dp=3, cp=2), lead=1),
        Layout(dp=3, cp=2),
        (None, None, "dp"),
    ),
]
# By default one case of each kind, with the dtypes in rotation.
DTYPES = (jnp.float32, jnp.float64, jnp.bfloat16)
DEFAULT = dict(zip((3, 5, 7, 12, 14, 18), itertools.cycle(DTYPES), strict=False))
PARAMS = [
    (pytest.param if DEFAULT.get(number) == dtype else slow)(
        *case, dtype, id=f"{case[0].shape}-{case[0].spec}-{number}-{dtype.__name__}"
    )
    for number, case in enumerate(CASES)
    for dtype in DTYPES
]


def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random bits, including -0.0, infinities and NaNs, which a sum would change."""
    size = jnp.dtype(dtype).itemsize
    bits = np.random.default_rng(0).integers(0, 256, (*shape, size), np.uint8)
    x = bits.view(dtype)[..., 0]
    x.flat[0] = -0.0
    return x


@pytest.mark.parametrize(("stored", "layout", "spec", "dtype"), PARAMS)
def test_every_bit_arrives_in_its_place(stored: Stored, layout: Layout, spec: tuple, dtype) -> None:
    """Compares with converting the whole array at once: same bits, including the padding."""
    mesh = make_mesh(layout)
    form = dataclasses.replace(stored.info, stored_shape=stored.shape, spec=spec, rows=None)
    x = numbers(stored.shape, dtype)
    bits = x.view(f"uint{8 * x.dtype.itemsize}")  # as floats, the bits of a NaN may change
    with jax.enable_x64(dtype == jnp.float64):
        placed = jax.device_put(x, NamedSharding(mesh, P(*spec)))
        held = conversion.from_canonical(stored, form, mesh)(placed)
        want = NamedSharding(mesh, P(*stored.spec))
        assert held.sharding.is_equivalent_to(want, held.ndim)
        assert np.asarray(held).tobytes() == np.asarray(stored.from_canonical(bits)).tobytes()
        back = conversion.to_canonical(stored, form, mesh)(held)
        assert back.sharding.is_equivalent_to(placed.sharding, back.ndim)
        assert np.asarray(back).tobytes() == x.tobytes()


LAYOUTS = [
    Layout(tp=4),
    Layout(pp=2, dp=2, zero=1, schedule="zb-v"),
    *(Layout(pp=4), Layout(dp=2, tp=2, zero=1)),
    *(Layout(dp=2, cp=2, zero=3), Layout(dp=2, ep=4, zero=2), Layout(pp=2, dp=2, tp=2, zero=2)),
    *(Layout(pp=2, row=2, col=2), Layout(dp=2, row=2, col=2, zero=3), Layout(pp=3, dp=2, zero=1)),
]
GPT = {"num_layers": 5, "hidden_size": 24, "num_heads": 12, "seq_length": 24}
QWEN = GPT | {"family": "qwen3", "num_kv_heads": 6, "tie_embeddings": False, "num_layers": 6}


@functools.cache  # parameters of equal shape share a conversion
def largest(convert: Any, x: jax.ShapeDtypeStruct) -> int:
    """Number of elements of the largest array in the compiled conversion."""
    text = convert.lower(x).compile().as_text()
    return max(
        math.prod(map(int, found.split(","))) for found in re.findall(r"u32\[([\d,]+)\]", text)
    )


@pytest.mark.parametrize("model", [GPT, slow(QWEN)], ids=["gpt", "qwen3"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], *map(slow, LAYOUTS[1:])], ids=str)
def test_no_device_holds_more_than_its_parts_and_their_margins(layout: Layout, model: dict) -> None:
    batch = {"batch": 24, "micro_batches": 2 if layout.pp > 1 else 1}
    program = tiny.program(layout, **batch, **model)
    mesh, count = program.mesh, 0
    for stored in program.states.stored.values():
        if stored.is_canonical:
            continue
        form = canonical_form(program, stored)
        shardings = [NamedSharding(mesh, P(*spec)) for spec in (form.spec, stored.spec)]
        shapes = stored.shape, stored.stored_shape
        plain, held = (
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
            for shape, sharding in zip(shapes, shardings, strict=True)
        )
        part = max(math.prod(s.shard_shape(n)) for s, n in zip(shardings, shapes, strict=True))
        found = max(
            largest(conversion.from_canonical(stored, form, mesh), plain),
            largest(conversion.to_canonical(stored, form, mesh), held),
        )
        lines, *inner = stored.shape if stored.info.stack else (1, *stored.shape)
        entry = math.prod(inner[1:])  # a margin is at least one entry
        assert found <= 1.5 * part + 2 * lines * entry, stored
        count += 1
    assert count


@pytest.mark.slow
def test_a_run_that_is_resumed_on_another_layout_prints_no_warning(tmp_path: Path) -> None:
    """XLA warns about every array that it copies whole to every device."""
    first = ["--train.steps=1", "--layout.dp=1", "--layout.tp=2"]
    then = ["--train.steps=2", "--layout.dp=2", "--layout.tp=2", "--layout.zero=1"]
    code = """
        import json
        import jaxptd
        from jaxptd.train import main
        jaxptd.simulate(4)
        for options in json.loads(sys.argv[2]):
            main(["--config=configs/test-tiny.yaml", f"--train.run_dir={directory}", *options])
        """
    process = run_python(code, tmp_path / "run", json.dumps([first, then]))
    assert process.returncode == 0, process.stderr
    assert "resum" in process.stdout
    assert "rematerialization" not in process.stderr
