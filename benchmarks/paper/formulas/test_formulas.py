"""Published formulas and lists, held against compiled steps and this library's mesh."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.paper import __main__ as paper
from benchmarks.paper.formulas import activations, groups, ring, ring_picture, sizes
from benchmarks.paper.formulas.growth import Growth, growth, simulated
from jaxptd.analysis.memory_report import published_layer
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.ring_attention import Ring, Scores, ring_qk

# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ring.LAYOUTS)
def test_one_more_layer_costs_what_the_formula_says(name: str) -> None:
    found = growth(ring.config(ring.Size(4, 256, 64), ring.LAYOUTS[name]), simulated)
    assert found.kept == found.formula
    parameters = found.state / 12
    assert parameters == pytest.approx(12 * 64**2 / (4 if name != "ring" else 1), rel=0.05)


def test_a_growth_is_state_gradients_and_what_is_kept() -> None:
    found = Growth(state=300, temporary=250, gradients=100, formula=150)
    assert (found.gradients, found.kept, found.total) == (100, 150, 550)


def test_the_published_sums_by_hand() -> None:
    size = ring.Size(B=2, L=16, H=8)  # B L H = 256, B Z L^2 / N = 512
    assert ring.published(size, 4, ring=False) == 48 * 64 / 4 + 8 * 256 / 4 + 2 * 256 + 512
    assert ring.published(size, 4, ring=True) == 48 * 64 + 10 * 256 / 4 + 512


@pytest.mark.parametrize("N", [2, 4, 8])
def test_both_need_as_much_at_the_break_even(N: int) -> None:
    size = ring.Size(1, round(ring.break_even(64, N)), 64)
    assert size.L == 24 * 64
    one, other = (ring.published(size, N, ring=each) for each in (False, True))
    assert one == pytest.approx(other)
    longer = size._replace(L=2 * size.L)
    assert ring.published(longer, N, ring=True) < ring.published(longer, N, ring=False)


def test_the_sizes_are_on_both_sides_of_the_break_even() -> None:
    wide, long = ring.SIZES
    assert ring.break_even(wide.H, ring.DEVICES) > wide.B * wide.L
    assert ring.break_even(long.H, ring.DEVICES) < long.B * long.L


def test_published_activations_are_those_of_the_formulas_in_words() -> None:
    unit = activations.SEQUENCES * activations.MODEL.seq_length * activations.MODEL.hidden_size
    scores = 5 * 16 * 1024 / 1024
    wanted = {
        Layout(): 34 + scores,
        Layout(tp=4): 10 + (24 + scores) / 4,
        Layout(tp=4, sequence_parallel=True): (34 + scores) / 4,
    }
    for config in activations.configs():
        if config.model.remat == "none":
            assert published_layer(config, "none") == wanted[config.layout] * unit


def test_the_pages_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = 8 * 1024 * 1024
    monkeypatch.setattr(activations, "absent", None)
    monkeypatch.setattr(
        activations, "growth", lambda *_: Growth(300, 3 * unit + 100, 100, 2 * unit)
    )
    monkeypatch.setattr(activations, "PLUGINS", "flax")
    monkeypatch.setattr(ring, "growth", lambda *_: Growth(1200, 4400, 400, 4000))
    for name in ("memory", "ring"):
        assert paper.main([f"--{name}", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "paper_memory.md").read_text()
    assert "| `one device` | `none` | 114.00 | 34.00 | 2.00 | 3.00 |" in text
    assert "| `tp=4 sequence_parallel` | `full` | 0.50 | 0.50 | 2.00 | 3.00 |" in text
    text = (tmp_path / "paper_ring.md").read_text()
    assert "| 1 | 64 | 128 | ring | 811,008 | 1,400 | 1,400 |" in text
    assert f"]({ring_picture.PICTURE})" in text and "1,536 tokens for H = 64" in text
    assert "RingAV" in (tmp_path / ring_picture.PICTURE).read_text()


# ---- the ring -----------------------------------------------------------------------------------


def test_blocks_of_the_picture_are_those_that_travel() -> None:
    """Numbers of blocks, sent round a ring of devices, are at each step where they are drawn."""
    n = ring_picture.DEVICES

    def visits(keys: jax.Array) -> jax.Array:
        """keys[1, 1], their block's number -> [1, n]: the block that is here at each step."""
        held = [keys]
        for _ in range(n - 1):
            held.append(jax.lax.ppermute(held[-1], Axis.CP, [(i, (i + 1) % n) for i in range(n)]))
        return jnp.concatenate(held, axis=1)

    mesh, spec = make_mesh(Layout(cp=n)), P(Axis.CP)
    run = jax.shard_map(visits, mesh=mesh, in_specs=spec, out_specs=spec)
    found = np.asarray(jax.jit(run)(jnp.arange(n).reshape(n, 1)))
    drawn = [[ring_picture.block(device, step) for step in range(n)] for device in range(n)]
    assert found.tolist() == drawn


def test_after_all_steps_rows_of_scores_are_complete() -> None:
    n, rng = ring_picture.DEVICES, np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 8, 1, 4)).astype(np.float32)
    rows = jax.jit(
        jax.shard_map(
            lambda q, k: ring_qk(q, k, Ring(Axis.CP, "rsa"), Scores(scale=1.0, causal=False)),
            mesh=make_mesh(Layout(cp=n, ring="rsa")),
            in_specs=P(None, Axis.CP),
            out_specs=P(None, None, Axis.CP),
        )
    )(q, k)
    np.testing.assert_allclose(rows, np.einsum("BTNH,BSNH->BNTS", q, k), rtol=1e-5, atol=1e-6)


# ---- lists --------------------------------------------------------------------------------------


def test_groups_are_the_documented_ones() -> None:
    assert [row[-1] for row in groups.rows()] == ["the same"] * 6
    assert [int(row[1]) for row in groups.rows()] == [8, 4, 8, 2, 4, 4]
    assert groups.page().count("the same") == 6 + 4
    assert groups.formula(1, 2) == [[2, 3], [6, 7]] == groups.layers_of(1, 2)


def test_another_order_of_ranks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "LAYOUT", dataclasses.replace(groups.LAYOUT, dp=4, tp=1))
    assert [row[-1] for row in groups.rows()].count("the same") < 6


def test_table_3_has_the_published_sizes() -> None:
    found = {row[0]: row[5] for row in sizes.rows()}
    assert found == {"0.54": "0.69", "1.20": "1.44", "2.50": "2.49", "4.20": "4.20"}
