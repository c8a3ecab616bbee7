"""The cost model of a grid beside 1D, and the pictures of docs/grid.md."""

import dataclasses
import math
from pathlib import Path
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from benchmarks.grid import break_even as even
from benchmarks.grid import pictures as grid_pictures
from jaxptd import comms
from jaxptd.analysis.collective import Collective
from jaxptd.config import Config, TrainConfig
from jaxptd.matmul.grid import Grid, panel_moves
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program

MODEL = dataclasses.replace(tiny.MODEL, dtype="bfloat16")
BATCH = 2
TOKENS = BATCH * MODEL.seq_length
ROOT = Path(__file__).parents[2]


def layer(layout: Layout) -> list[Collective]:
    """The collectives of a layer's activations and matrices, without sums made once a step."""
    config = Config(MODEL, layout, train=TrainConfig(global_batch_size=BATCH, platform="cpu"))
    found = comms.per_layer(Program(config, make_mesh(layout)))
    return [each for each in found if each.count]


def sent(found: list[Collective], layout: Layout) -> int:
    return sum(
        each.wire_bytes({str(axis): n for axis, n in layout.sizes.items()}) for each in found
    )


def messages(found: list[Collective], layout: Layout) -> int:
    total = 0
    for each in found:
        others = math.prod(getattr(layout, axis) for axis in each.axes) - 1
        rounds = {"collective-permute": 1, "all-reduce": 2 * others}.get(each.kind, others)
        total += each.count * rounds
    return total


@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.slow),
        (2, 4),
    ],
)
def test_what_a_layer_on_a_grid_sends_is_the_closed_form(rows: int, cols: int) -> None:
    layout = Layout(row=rows, col=cols, ring="blockwise")
    found = layer(layout)
    assert sent(found, layout) == even.on_grid(rows, cols, MODEL.hidden_size).at(TOKENS)
    assert messages(found, layout) == even.messages_on_grid(rows, cols)
    along = [each for each in found if each.axes == ("col",)]
    assert sent(along, layout) == even.along_col(rows, cols, MODEL.hidden_size).at(TOKENS)


@pytest.mark.slow
def test_what_a_layer_in_1d_sends_is_the_closed_form() -> None:
    layout = Layout(tp=4, sequence_parallel=True, keep_gathered=True)
    found = layer(layout)
    assert sent(found, layout) == even.one_way(4, MODEL.hidden_size).at(TOKENS)
    assert messages(found, layout) == even.messages_one_way(4)


def test_four_devices_send_more_on_a_grid_whatever_the_batch() -> None:
    assert even.cheaper(2, 2, 4096) is None
    assert even.first(4, 4096) is None


@pytest.mark.parametrize(("rows", "cols"), [(3, 3), (4, 2), (4, 4), (8, 8)])
def test_both_cost_the_same_at_the_break_even(rows: int, cols: int) -> None:
    links = even.Links(tp=450e9, row=450e9, col=450e9, latency=1e-7)
    for each in (even.BYTES, links):
        span = even.cheaper(rows, cols, 4096, each)
        assert span is not None and span[1] == math.inf
        grid, line = (cost.at(span[0]) for cost in costs(rows, cols, each))
        assert grid == pytest.approx(line)
        grid, line = (cost.at(2 * span[0]) for cost in costs(rows, cols, each))
        assert grid < line


def costs(
    rows: int, cols: int, links: even.Links, hidden: int = 4096
) -> tuple[even.Cost, even.Cost]:
    return even.on_grid(rows, cols, hidden, links), even.one_way(rows * cols, hidden, links)


def test_break_even_of_a_square_grid_by_hand() -> None:
    for q, hidden in ((3, 4096), (4, 1920), (8, 4096)):
        span = even.cheaper(q, q, hidden)
        assert span is not None
        assert span[0] == pytest.approx(96 * hidden / (16 * (q + 1) - 58 - 64 / hidden))


def test_a_grid_of_slow_columns_is_cheaper_for_few_tokens_if_messages_cost() -> None:
    links = even.Links(tp=400e9, row=50e9, col=450e9, latency=1e-5)
    span = even.cheaper(8, 8, 1920, links)
    assert span is not None and span[0] == 0
    grid, line = (cost.at(span[1]) for cost in costs(8, 8, links, 1920))
    assert grid == pytest.approx(line)
    grid, line = (cost.at(span[1] / 2) for cost in costs(8, 8, links, 1920))
    assert grid < line


def test_first_is_the_grid_that_is_cheaper_at_the_fewest_tokens() -> None:
    rows, cols, tokens = even.first(64, 4096) or (0, 0, 0.0)
    found = {c: even.cheaper(64 // c, c, 4096) for c in (2, 4, 8, 16, 32)}
    assert (rows, cols) == (4, 16)
    assert tokens == min(span[0] for span in found.values() if span)


def test_the_page_has_the_table(capsys: pytest.CaptureFixture) -> None:
    assert even.main(["--hidden", "4096"]) == 0
    assert capsys.readouterr().out in (ROOT / "docs" / "grid.md").read_text(encoding="utf-8")


# ---- pictures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["fox", "cannon", "summa"])
def test_blocks_of_each_step_are_where_the_picture_has_them(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid_pictures, "Q", 2)
    grid = Grid(algorithm)  # type: ignore[arg-type]

    def visit(block: jax.Array) -> jax.Array:
        """block[1, 1], its number -> the numbers of A's and B's at each step, [1, 1, 2, 2]."""
        both = []
        for way, dim in zip(panel_moves(grid), (1, 0), strict=True):
            first = way.fetch(block, dim, 0, None)
            both.append(jnp.stack([first, way.fetch(block, dim, 1, first)], -1))
        return jnp.stack(both, -2)

    run = jax.shard_map(
        visit,
        mesh=make_mesh(Layout(row=2, col=2)),
        in_specs=P("row", "col"),
        out_specs=P("row", "col"),
    )
    found = np.asarray(jax.jit(run)(jnp.arange(4, dtype=jnp.float32).reshape(2, 2)))
    for i, j, step in np.ndindex(2, 2, 2):
        k = grid_pictures.panel(algorithm, i, j, step)
        assert found[i, j, :, step].tolist() == [2 * i + k, 2 * k + j]


@pytest.mark.slow
def test_pictures_are_the_same_each_time(tmp_path: Path) -> None:
    assert grid_pictures.main(["--out", str(tmp_path / "one")]) == 0
    grid_pictures.draw(tmp_path / "two")
    assert len(grid_pictures.PICTURES) == 4
    for name in grid_pictures.PICTURES:
        one, two = (tmp_path / each / name for each in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
        assert ElementTree.parse(one).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert b"<dc:date>" not in one.read_bytes()


def test_a_step_of_the_picture_names_its_blocks() -> None:
    step = grid_pictures.fox().axes[1]
    names = [text.get_text() for text in step.texts]
    assert names[9:12] == ["A12", "B20", "adds to C10"]  # three a device: those of (1, 0)
    assert sum(name.startswith("adds to") for name in names) == 9
