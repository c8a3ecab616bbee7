"""The pictures of the pages are current, and show schedules, grids and rings as they are."""

from pathlib import Path
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.pictures import grid, pipeline, remat, ring
from benchmarks.pictures.__main__ import main
from jaxptd.matmul.grid import Grid, panel_moves
from jaxptd.mesh import Layout, make_mesh
from jaxptd.pipeline.schedules import SCHEDULES, make_schedule
from jaxptd.pipeline.statistics import expected_bubble, expected_peak, simulate
from jaxptd.plot.style import save_pictures

ALL = {name: draw for part in (grid, pipeline, remat, ring) for name, draw in part.PICTURES.items()}
PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
QUICK = ("context_break_even.svg", "pipeline_cost.svg", "pipeline_1f1b.svg", "remat_kept.svg")


def words(path: Path) -> list[str]:
    """The texts of a picture, in the order in which they are drawn."""
    texts = (each for each in ElementTree.parse(path).iter() if each.tag.endswith("}text"))
    return ["".join(each.itertext()).strip() for each in texts]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ALL]
)
def test_a_picture_is_current_and_the_same_each_time(name: str, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        save_pictures({name: ALL[name]}, tmp_path / folder)
    assert words(tmp_path / "one" / name) == words(PICTURES / name) != []
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_command_draws_a_subject(tmp_path: Path) -> None:
    assert main(["remat", "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["remat_kept.svg"]


# ---- pipelines ----------------------------------------------------------------------------------


def test_a_bar_is_where_its_operation_runs() -> None:
    panels = pipeline.in_time().axes
    for axes, schedule in zip(panels, pipeline.schedules(), strict=True):
        timing = simulate(schedule)
        for bar, (tick, stage, *_) in zip(axes.patches, schedule.operations(), strict=True):
            assert bar.get_x() == timing.start[tick, stage]
            assert bar.get_width() == timing.end[tick, stage] - timing.start[tick, stage]
            assert round(bar.get_y() + bar.get_height() / 2, 6) == stage


def test_the_curves_are_the_formulas() -> None:
    bubbles, held = pipeline.cost().axes
    compared = 0
    for name, share, most in zip(SCHEDULES, bubbles.lines, held.lines, strict=True):
        assert share.get_label() == most.get_label() == name
        points = zip(share.get_xdata(), share.get_ydata(), most.get_ydata(), strict=True)
        for m, percent, micro_batches in points:
            schedule = make_schedule(name, stages=8, micro_batches=int(m))
            formula, peak = expected_bubble(schedule), expected_peak(schedule)
            assert peak is not None and micro_batches == peak.max()
            if formula is not None:
                np.testing.assert_allclose(percent, 100 * formula, rtol=0, atol=1e-9)
                compared += 1
    assert compared == 22  # 6 schedules, 4 numbers; zb-h2 and zb-v have no formula for m = p


# ---- grids, rings, layers -----------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["fox", "cannon", "summa"])
def test_blocks_of_each_step_are_where_the_picture_has_them(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "Q", 2)
    made = Grid(algorithm)  # type: ignore[arg-type]

    def visit(block: jax.Array) -> jax.Array:
        """block[1, 1], its number -> the numbers of A's and B's at each step, [1, 1, 2, 2]."""
        both = []
        for way, dim in zip(panel_moves(made), (1, 0), strict=True):
            first = way.fetch(block, dim, 0, None)
            both.append(jnp.stack([first, way.fetch(block, dim, 1, first)], -1))
        return jnp.stack(both, -2)

    mesh, spec = make_mesh(Layout(row=2, col=2)), P("row", "col")
    run = jax.shard_map(visit, mesh=mesh, in_specs=spec, out_specs=spec)
    found = np.asarray(jax.jit(run)(jnp.arange(4, dtype=jnp.float32).reshape(2, 2)))
    for i, j, step in np.ndindex(2, 2, 2):
        k = grid.panel(algorithm, i, j, step)
        assert found[i, j, :, step].tolist() == [2 * i + k, 2 * k + j]


def test_map_of_work() -> None:
    assert ring.owners("zigzag", 4).tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
    assert ring.work("zigzag", 4).tolist() == [8, 8, 8, 8]
    assert ring.work("blockwise", 4).tolist() == [2, 6, 10, 14]


def test_everything_that_a_layer_keeps_is_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    config = remat.Config(model=remat.MODEL)
    kept = sum(remat.by_group(config).values())
    (stack,) = remat.architecture_of(config.model).stacks
    every = list(remat.kept_by_layer(config, stack))
    for policy, size in zip(remat.POLICIES, kept, strict=True):
        assert size == sum(each.bytes * each.times.get(policy, 0) for each in every)
    monkeypatch.delitem(remat.GROUPS, "q, k, v")
    with pytest.raises(ValueError, match="not enough values"):
        remat.by_group(config)
