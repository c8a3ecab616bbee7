"""8-bit matmuls: correctly rounded, the same on every layout, no extra communication."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contract import relative
from turns import slow

from jaxptd.analysis.compiled_step import random_batch
from jaxptd.analysis.count import collectives_of
from jaxptd.analysis.jaxprs import equations
from jaxptd.errors import UserError
from jaxptd.layers.fp8 import BACKWARD, FORWARD, FP8, choose_precision, fp8_matmul, quantised
from jaxptd.layers.tensor_parallel import NATIVE, matmul
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program

PIPELINE = Layout(pp=2, dp=2, tp=2, schedule="zb-h1")
RING_STEPS = Layout(tp=2, sequence_parallel=True, collective_matmul=True)
LAYOUTS = [
    *(slow(Layout(tp=2)), slow(tiny.SEQUENCE_PARALLEL), slow(Layout(row=2, col=2))),
    slow(Layout(row=2, col=4, matmul2d="summa")),
    slow(Layout(row=2, col=2, matmul2d="fox")),
    slow(Layout(row=2, col=2, matmul2d="cannon", cp=2, attention2d="blocks")),
    slow(Layout(row=2, col=2, matmul2d_slices=2, dp=2, zero=3)),
    slow(Layout(row=2, col=2, pp=2, schedule="zb-h1")),
    slow(RING_STEPS),
    slow(Layout(dp=2, tp=4, sequence_parallel=True, collective_matmul=True, zero=3)),
    *(
        slow(layout)
        for layout in (PIPELINE, Layout(dp=4), tiny.CONTEXT_PARALLEL, Layout(pp=2, cp=2, tp=2))
    ),
]
# Half the relative distance between neighbours, with mantissas of 3 and 2 bits.
ROUNDING = {FORWARD: 2.0**-4, BACKWARD: 2.0**-3}
rounded = jax.jit(quantised, static_argnums=1)
FORMATS = pytest.mark.parametrize("dtype", [FORWARD, BACKWARD], ids=["e4m3", "e5m2"])


def normal(shape, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


# ---- rounding ---------------------------------------------------------------------------------


@FORMATS
@pytest.mark.parametrize("size", [1e-30, 3e-5, 1.0, 700.0, 1e30])
def test_every_element_is_rounded_to_the_next_number_of_the_format(dtype, size):
    x = np.asarray(size * normal((64, 64)))
    x = np.where(np.abs(x) < 1e-3 * size, 1e-3 * size, x)  # none below the normal range
    x8 = rounded(jnp.asarray(x), dtype)
    error = np.abs(np.asarray(x8.values) / x - 1)
    assert ROUNDING[dtype] / 2 < error.max() <= ROUNDING[dtype]
    assert np.log2(float(x8.scale)) % 1 == 0
    top = float(jnp.finfo(dtype).max)
    assert top / 2 <= np.abs(np.asarray(x8.bits, np.float32)).max() <= top


@FORMATS
def test_a_part_is_rounded_as_the_whole_is(dtype):
    """Devices therefore need not know each other's largest element."""
    x = normal((256, 16)) * 2.0 ** jnp.linspace(-6, 3, 256)[:, None]
    x = jnp.where(jnp.abs(x) < 2.0**-9, 0, x)
    blocks = [rounded(block, dtype) for block in jnp.split(x, 8)]
    assert len({float(block.scale) for block in blocks}) > 4
    np.testing.assert_array_equal(
        np.concatenate([block.values for block in blocks]), rounded(x, dtype).values
    )


@pytest.mark.parametrize("bad", [jnp.nan, slow(jnp.inf), slow(-jnp.inf)])
def test_what_is_not_finite_stays_so(bad):
    x, w = normal((4, 8)).at[1, 2].set(bad), normal((8, 3))
    y = jax.jit(fp8_matmul, static_argnums=2)(x, w, 1)
    assert not jnp.isfinite(y[1]).any()


def test_nothing_but_zeros_is_zero():
    def total(x, w):
        return fp8_matmul(x, w, 1).sum()

    zeros = jnp.zeros((4, 8)), jnp.zeros((8, 3))
    for x in jax.tree.leaves(jax.jit(jax.value_and_grad(total, (0, 1)))(*zeros)):
        np.testing.assert_array_equal(x, 0)


@pytest.mark.parametrize("dtype", [slow(jnp.float32), jnp.bfloat16, slow(jnp.float16)], ids=str)
def test_value_and_gradients_are_as_near_as_the_formats_allow(dtype):
    """The typical rounding error is 0.4 of the largest; two independent ones add in quadrature."""
    x, w = normal((16, 8, 4, 16)).astype(dtype), 0.02 * normal((4, 16, 5, 12), 1)
    dy = normal((16, 8, 5, 12), 2).astype(dtype)
    (y, dx, dw), (want, want_dx, want_dw) = (both_ways(f, x, w, dy) for f in FUNCTIONS)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
    forward, backward = (0.4 * ROUNDING[each] for each in (FORWARD, BACKWARD))
    assert near(y, want) == pytest.approx(np.hypot(forward, forward), rel=0.15)
    assert near(dx, want_dx) == pytest.approx(np.hypot(forward, backward), rel=0.15)
    assert near(dw, want_dw) == pytest.approx(np.hypot(forward, backward), rel=0.15)
    exact = jnp.einsum(
        "btnh,nhdf->btdf", *(quantised(each, FORWARD).values for each in (x, w.astype(dtype)))
    )
    assert near(y, exact) <= float(jnp.finfo(dtype).eps)


FUNCTIONS = (fp8_matmul, matmul)


@functools.partial(jax.jit, static_argnums=0)
def both_ways(function, x, w, dy):
    y, vjp = jax.vjp(lambda x, w: function(x, w, 2), x, w)
    return y, *vjp(dy)


def near(found: jax.Array, want: jax.Array) -> float:
    return relative(np.asarray(found, np.float32), np.asarray(want, np.float32))


# ---- in the model -----------------------------------------------------------------------------


@functools.cache
def program(layout: Layout, **choices) -> Program:
    """Makes a program that begins with a model's own initial values, of which bounds here are."""
    config = tiny.config(layout, **{"products": "fp8", "micro_batches": 1, **choices})
    return Program(config, make_mesh(layout))


def gradients(run: Program) -> dict[str, np.ndarray]:
    batch = run.place(random_batch(run.config, seed=0))
    grads = run.gradients(run.init_state(), batch)[2]
    return jax.tree.map(np.asarray, run.canonical(grads))


def worst(found: dict, expected: dict) -> float:
    return max(relative(found[name], want) for name, want in expected.items())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_computes_what_one_device_does(layout):
    """Results agree in float32, except where its rounding moves an element to a neighbour."""
    assert worst(gradients(program(layout)), gradients(program(Layout()))) < 1e-3


@pytest.mark.slow
def test_gradients_are_near_those_of_native_products():
    found, native = (gradients(program(Layout(), products=kind)) for kind in ("fp8", "native"))
    assert 0.02 < worst(found, native) < 0.3


GROUPS = {"family": "qwen2", "num_kv_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4), PIPELINE], ids=str)
def test_groups_of_heads_too(layout):
    """Queries, keys and values are one matmul with concatenated weights."""
    want = gradients(program(Layout(), **GROUPS))
    native = gradients(program(Layout(), products="native", **GROUPS))
    assert 0.02 < worst(want, native) < 0.3
    assert worst(gradients(program(layout, **GROUPS)), want) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tp=2), PIPELINE], ids=str)
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_encoders_too(family, layout):
    choice = {"bert": {"family": "bert"}, "t5": tiny.T5}[family]
    want = gradients(program(Layout(), **choice))
    native = gradients(program(Layout(), products="native", **choice))
    assert 0.02 < worst(want, native) < 0.3
    assert worst(gradients(program(layout, **choice)), want) < 1e-3


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (Layout(dp=2, ep=2, tp=2), 1),
        slow(Layout(ep=4, zero=1), 2),
        slow(Layout(ep=2, tp=2, sequence_parallel=True, collective_matmul=True), 2),
        slow(Layout(ep=2, tp=2, experts="whole", sequence_parallel=True), 2),
        slow(PIPELINE, 2),
    ],
    ids=str,
)
def test_experts_too(layout, layers):
    """Uses several chunks of rows, which other layouts split at other places."""
    choice = tiny.MOE | {"moe.chunk": 0.5, "num_layers": layers}
    want = gradients(program(Layout(), **choice))
    native = gradients(program(Layout(), products="native", **choice))
    assert 0.02 < worst(want, native) < 0.3
    assert worst(gradients(program(layout, **choice)), want) < 1e-3


def trace(run: Program):
    return run.train_step.trace(run.abstract_state, run.abstract_batch).jaxpr


@pytest.mark.parametrize("layout", [slow(tiny.CONTEXT_PARALLEL), Layout(dp=2, tp=4)], ids=str)
def test_nothing_more_is_moved(layout):
    native, eight = (program(layout, products=kind) for kind in ("native", "fp8"))
    moved = [collectives_of(trace(run), run.mesh) for run in (native, eight)]
    assert moved[0] == moved[1]


@pytest.mark.parametrize(
    ("choice", "products"),
    [({}, 4), slow(GROUPS, 4), (tiny.T5, 4 + 7)],
    ids=["alone", "groups", "t5"],
)
def test_products_of_a_block_with_their_gradients_and_no_others_are_in_8_bits(choice, products):
    """Queries and grouped keys and values are one matmul; cross-attention has three."""
    run = program(Layout(), dtype="bfloat16", **choice)
    every = list(equations(trace(run)))
    made_by = {id(made): e for e in every for made in e.outvars}
    dots = [e for e in every if e.primitive.name == "dot_general"]
    of = {id(e): "".join(sorted(format_of(v, made_by) for v in e.invars)) for e in dots}
    kinds = list(of.values())
    assert kinds.count("float8_e4m3fn" * 2) == products
    assert kinds.count("float8_e4m3fnfloat8_e5m2") == 2 * products
    assert kinds.count("bfloat16" * 2) > 3  # output layer and attention
    assert {e.outvars[0].aval.dtype for e in dots if "float8" in of[id(e)]} == {
        jnp.dtype("bfloat16")
    }


def test_all_products_of_experts_are_in_8_bits():
    run = program(Layout(), dtype="bfloat16", **tiny.MOE)
    every = list(equations(trace(run)))
    made_by = {id(made): e for e in every for made in e.outvars}
    of_rows = [e for e in every if e.primitive.name.startswith("ragged_dot")]
    formats = [format_of(v, made_by) for e in of_rows for v in e.invars[:2]]
    assert len(of_rows) >= 2 + 1 + 4  # forward, again in backward, gradients
    assert set(formats) == {"float8_e4m3fn"}


def format_of(operand, made_by) -> str:
    """The type of a matmul's operand before it was widened and scaled."""
    scaled = made_by.get(id(operand))
    if scaled is not None and scaled.primitive.name == "transpose":
        return format_of(scaled.invars[0], made_by)
    if scaled is None or scaled.primitive.name != "mul":
        return operand.aval.dtype.name
    return made_by[id(scaled.invars[0])].invars[0].aval.dtype.name


@pytest.mark.slow
def test_it_learns_as_native_products_do():
    curves = []
    for products in ("native", "fp8"):
        run = program(Layout(), products=products, dtype="bfloat16")
        state, losses = run.init_state(), []
        for _ in range(30):
            state, metrics = run.train_step(state, run.place(tiny.batch()))
            losses.append(float(metrics["loss"]))
        curves.append(losses)
    assert curves[0][-1] < 0.6 * curves[0][0]
    learned = curves[0][0] - curves[0][-1]
    np.testing.assert_allclose(curves[1], curves[0], atol=0.05 * learned)


# ---- where it can run -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "capability", "able"),
    [("gpu", "8.0", False), ("gpu", "8.9", True), ("cuda", "9.0", True), ("cpu", None, True)],
)
def test_a_gpu_without_8_bit_products_is_refused(platform, capability, able):
    more = {"compute_capability": capability} if capability else {}
    device = types.SimpleNamespace(platform=platform, device_kind="NVIDIA A100", **more)
    assert choose_precision("native", device) is NATIVE
    if able:
        assert choose_precision("fp8", device) is FP8
        return
    words = r"8\.9 or higher; NVIDIA A100 has 8\.0; use model\.products=native"
    with pytest.raises(UserError, match=words):
        choose_precision("fp8", device)


@pytest.mark.slow
def test_evaluation_has_the_same_precision():
    run = program(Layout(), dtype="bfloat16")
    native = dataclasses.replace(run, config=tiny.config(Layout(), dtype="bfloat16"))
    params = run.init_state()["params"]
    sums = [p.eval_step(params, tiny.batch())["cross_entropy"]["sum"] for p in (run, native)]
    losses = [float(each) for each in sums]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


@pytest.mark.slow
def test_parts_that_come_in_bfloat16_are_rounded_as_whole_ones():
    """ZeRO gathers weights in the model's precision, in which matmuls read them.

    ZeRO's last micro-batch is a separate program, in which XLA would skip other roundings to
    bfloat16 between operations; here it skips none.
    """
    found = []
    for layout in (Layout(dp=2), Layout(dp=2, zero=1)):
        run = program(layout, dtype="bfloat16", micro_batches=2)
        given = run.init_state(), run.place(random_batch(run.config, seed=0))
        step = run.step_with_gradients.lower(*given).compile({"xla_allow_excess_precision": False})
        found.append(jax.tree.map(np.asarray, run.canonical(step(*given)[2])))
    assert worst(found[1], found[0]) < 2**-8
