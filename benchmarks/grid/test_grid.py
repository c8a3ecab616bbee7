"""Memory on a grid is what table 1 says; every config loads; overlaps of collectives are read."""

from pathlib import Path

import pytest

from benchmarks.grid import __main__ as grid
from benchmarks.grid import gpu as grid_gpu
from benchmarks.grid.__main__ import Held, held
from benchmarks.grid.gpu import Compiled, laid_out
from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jaxptd.analysis.hlo.timeline import Move, Work
from jaxptd.commands.command_line import make_parser, parse
from jaxptd.config import Config
from jaxptd.mesh import Layout

CONFIGS = Path(__file__).parents[2] / "configs"
GRIDS = [layout for named, layout in grid.LAYOUTS if named == "TP2D"]


def config(path: Path) -> Config:
    return parse(make_parser("x", ""), ["--config", str(path)])[0]


# ---- configs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_loads(path: Path) -> None:
    found = config(path)
    assert found.train.run_dir == f"runs/{path.stem}"


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "devices", "batch"),
    [
        ("0.54b", 32, 1280, 20, 1, 32),
        ("1.2b", 48, 1536, 24, 2, 32),
        ("2.5b", 54, 1920, 30, 4, 32),
        ("4.2b", 64, 2304, 36, 8, 64),
    ],
)
def test_sizes_are_those_of_table_3(
    name: str, layers: int, hidden: int, heads: int, devices: int, batch: int
) -> None:
    path = CONFIGS / f"gpt2-{name}.yaml"
    found = config(path)
    model = found.model
    assert (model.num_layers, model.hidden_size, model.num_heads) == (layers, hidden, heads)
    assert (model.block.head_size, model.seq_length) == (64, 512)
    assert (found.layout.num_devices, found.train.global_batch_size) == (devices, batch)
    assert f"# Devices: {devices}" in path.read_text(encoding="utf-8")


# ---- table 1 ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one() -> Held:
    return held(Layout())


@pytest.fixture(scope="module")
def gather() -> Held:
    return held(GRIDS[0])


@pytest.mark.slow
def test_one_device_keeps_sixteen_and_what_is_known_of_each_token(one: Held) -> None:
    """4 + 12 of B T D; four statistics a token, and a logsumexp for each head."""
    tokens, D, N = 8 * 32, 64, 8
    assert one.activations == 4 * tokens * (16 * D + 4 + N)
    assert one.statistics == 4 * tokens * 4
    assert one.data == 4 * tokens * D and one.ids == 4 * tokens


@pytest.mark.slow
def test_zero_holds_an_nth_of_the_state_and_all_activations(one: Held) -> None:
    found = held(Layout(dp=4, zero=3))
    assert all(4 * found.weights[name] == size for name, size in one.weights.items())
    assert 4 * found.gradients == one.gradients
    assert 4 * found.optimizer == one.optimizer
    assert (found.data, found.kept, found.ids) == (one.data, one.kept, one.ids)


@pytest.mark.slow
def test_a_device_of_the_grid_has_its_share(one: Held, gather: Held) -> None:
    """Statistics are replicated over col; all else that is kept is sharded over both axes."""
    assert (gather.activations - gather.statistics) * 4 == one.activations - one.statistics
    assert gather.statistics * 2 == one.statistics
    assert gather.data * 4 == one.data
    assert gather.ids == one.ids
    vectors = [name for name, size in one.weights.items() if gather.weights[name] * 2 == size]
    matrices = [name for name, size in one.weights.items() if gather.weights[name] * 4 == size]
    assert sorted(vectors + matrices) == sorted(one.weights)
    assert all(name.endswith((".b", "norm.w")) for name in vectors)
    assert all(name.endswith((".w", ".table")) for name in matrices)
    assert gather.gradients == sum(gather.weights.values())
    assert gather.optimizer == 2 * gather.gradients  # both of Adam's means


@pytest.mark.slow
@pytest.mark.parametrize("layout", GRIDS[1:], ids=lambda layout: layout.matmul2d)
def test_every_algorithm_holds_the_same(layout: Layout, gather: Held) -> None:
    assert held(layout) == gather


@pytest.mark.slow
def test_1d_holds_more_than_an_nth_of_the_activations(one: Held) -> None:
    """Sequence parallelism may keep 2 of 16 B T D whole, the inputs of products; others are 1/4."""
    found = held(Layout(tp=4, sequence_parallel=True, keep_gathered=True))
    tokens, D, N = 8 * 32, 64, 8
    kept = 4 * D + 12 * D // 4 + 4 // 4 + N // 4
    assert found.activations < one.activations
    assert found.activations == 4 * tokens * (kept - 2 * D + 2 * D // 4)
    assert "1/1 of positions.table" in grid.more_than_nth(one, found)


@pytest.mark.slow
def test_rows_have_the_papers_entries(one: Held, gather: Held) -> None:
    row = grid.shares(GRIDS[0], one, gather)
    assert row[0] == "TP2D: row=2 col=2 zigzag gather heads"
    assert row[1] == "0.250 (D/N)" and row[5] == "0.251 (M/N)" and row[6] == "1.000"
    assert len(row) == len(grid.HEAD)
    words = grid.activations(GRIDS[0], one, gather)
    assert words[1:4] == ["4.062", "1.0039", "1.0000"]
    assert len(words) == len(grid.KEPT_HEAD)
    more = grid.more_than_nth(one, gather)
    assert "1/2 of norm.w" in more and "table" not in more


def test_table_is_written_with_a_row_for_each_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = Held(64, {"norm.w": 16, "mlp.up.w": 256}, 272, 544, 16, ((4, 4, 16), (4, 4, 1)))
    monkeypatch.setattr(grid, "held", lambda layout: some)
    path = tmp_path / "grid.md"
    assert grid.main(["--out", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Memory on a grid\n") and "## Simulated devices" in text
    assert "not built" not in text
    assert text.count("| TP2D:") == 4 and text.count("| ZeRO: dp=4 zero=3 |") == 1


# ---- compiled for GPUs ------------------------------------------------------------------------

MOVES = [
    Move("g.done", "forward", 128, 5, Work(products=1), ALL_GATHER, ("col",)),
    Move("a", "forward", 64, 5, Work(), ALL_REDUCE, ("row", "col")),
    Move("r.done", "backward", 64, 5, Work(attention=1), REDUCE_SCATTER, ("row",)),
]


def test_bytes_are_told_by_axes_and_by_what_hides_them() -> None:
    layout = Layout(row=2, col=2)
    small = laid_out(Config(), layout)
    found = Compiled(small, "TP2D=4", 3 << 30, 2 << 30, 1 << 30, MOVES)
    assert found.sent() == 320 + 480 + 320
    assert found.sent(axes="row x col") == 480 and found.sent(over="attention") == 320
    assert found.needs[1:4] == ["3.00", "2.00", "1.00"]
    assert found.needs[4].startswith("col 0.00, row 0.00, row x col 0.00")
    assert found.needs[-1] == "19.8 (TP2D=4)" and len(found.needs) == len(grid_gpu.NEEDS)
    rows = list(found.over)
    assert [row[1] for row in rows] == ["all", "all-gather", "all-reduce", "reduce-scatter"]
    assert rows[0][2:] == ["15", "0.00", "29%", "29%", "43%"]
    assert rows[2][4:] == ["0%", "0%", "100%"]


def test_heads_that_do_not_split_become_fewer() -> None:
    large = config(CONFIGS / "gpt2-2.5b.yaml")
    assert laid_out(large, Layout(tp=2)).model.num_heads == 30
    assert laid_out(large, Layout(tp=4)).model.num_heads == 24
    assert laid_out(large, Layout(row=2, col=2)).model == large.model


def test_report_has_a_row_for_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(config: Config, named: str, options: object) -> Compiled:
        return Compiled(config, named, 1, 1, 1, [])

    monkeypatch.setattr(grid_gpu, "compiled", compiled)
    monkeypatch.setattr(grid_gpu, "on_h200s", lambda config: config)
    monkeypatch.setattr(grid_gpu, "PLUGINS", "jax")
    page = grid_gpu.report(config(CONFIGS / "gpt2-2.5b.yaml"))
    assert page.count("| row=2 col=2 zigzag gather in 4 slices heads, 30 heads |") == 2
    assert "54 layers, hidden 1920, sequence 512, 8 samples a GPU, bfloat16, remat dots." in page
