"""Memory on a grid is what table 1 says; its costs against 1D; the race of pairs of matmuls."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny

from benchmarks.grid import __main__ as grid
from benchmarks.grid import break_even as even
from benchmarks.grid import summa2d
from benchmarks.grid.__main__ import Held, held
from benchmarks.grid.gpu import Compiled, laid_out
from benchmarks.lib.timing import TOLERANCE, DifferentError
from jaxptd import comms
from jaxptd.analysis.hlo.timeline import Move, Work
from jaxptd.commands.command_line import load_config
from jaxptd.config import Config, TrainConfig
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective
from jaxptd.errors import UserError
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program

ROOT = Path(__file__).parents[2]
GRIDS = [layout for named, layout in grid.LAYOUTS if named == "TP2D"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_loads(path: Path) -> None:
    assert load_config(path).train.run_dir == f"runs/{path.stem}"


# ---- table 1 ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one() -> Held:
    return held(Layout())


@pytest.fixture(scope="module")
def gather() -> Held:
    return held(GRIDS[0])


@pytest.mark.slow
def test_one_device_keeps_sixteen_and_what_is_known_of_each_token(one: Held) -> None:
    """4 + 12 of B T D, four statistics per token, and a logsumexp for each head."""
    tokens, D, N = 8 * 32, 64, 8
    assert one.activations == 4 * tokens * (16 * D + 4 + N)
    assert one.statistics == 4 * tokens * 4
    assert one.data == 4 * tokens * D and one.ids == 4 * tokens


@pytest.mark.slow
def test_zero_holds_an_nth_of_the_state_and_all_activations(one: Held) -> None:
    found = held(Layout(dp=4, zero=3))
    assert all(4 * found.weights[name] == size for name, size in one.weights.items())
    assert (4 * found.gradients, 4 * found.optimizer) == (one.gradients, one.optimizer)
    assert (found.data, found.kept, found.ids) == (one.data, one.kept, one.ids)


@pytest.mark.slow
def test_a_device_of_the_grid_has_its_share(one: Held, gather: Held) -> None:
    """Statistics are replicated over col; all else that is saved is sharded over both axes."""
    assert (gather.activations - gather.statistics) * 4 == one.activations - one.statistics
    assert gather.statistics * 2 == one.statistics
    assert (gather.data * 4, gather.ids) == (one.data, one.ids)
    vectors = [name for name, size in one.weights.items() if gather.weights[name] * 2 == size]
    matrices = [name for name, size in one.weights.items() if gather.weights[name] * 4 == size]
    assert sorted(vectors + matrices) == sorted(one.weights)
    assert all(name.endswith((".b", "norm.w")) for name in vectors)
    assert gather.gradients == sum(gather.weights.values())
    assert gather.optimizer == 2 * gather.gradients  # both of Adam's means
    row = grid.shares(GRIDS[0], one, gather)
    assert row[1] == "0.250 (D/N)" and row[5] == "0.251 (M/N)" and row[6] == "1.000"
    assert grid.activations(GRIDS[0], one, gather)[1:4] == ["4.062", "1.0039", "1.0000"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", GRIDS[1:], ids=lambda layout: layout.matmul2d)
def test_every_algorithm_holds_the_same(layout: Layout, gather: Held) -> None:
    assert held(layout) == gather


@pytest.mark.slow
def test_1d_holds_more_than_an_nth_of_the_activations(one: Held) -> None:
    """Sequence parallelism may save 2 of 16 B T D whole, the inputs of matmuls; the rest is 1/4."""
    found = held(Layout(tp=4, sequence_parallel=True, keep_gathered=True))
    tokens, D, N = 8 * 32, 64, 8
    kept = 4 * D + 12 * D // 4 + 4 // 4 + N // 4
    assert found.activations == 4 * tokens * (kept - 2 * D + 2 * D // 4) < one.activations
    assert "1/1 of positions.table" in grid.more_than_nth(one, found)


# ---- compiled for GPUs ------------------------------------------------------------------------


def test_bytes_are_told_by_axes_and_by_what_hides_them() -> None:
    moves = [
        Move("g.done", "forward", 128, 5, Work(products=1), ALL_GATHER, ("col",)),
        Move("a", "forward", 64, 5, Work(), ALL_REDUCE, ("row", "col")),
        Move("r.done", "backward", 64, 5, Work(attention=1), REDUCE_SCATTER, ("row",)),
    ]
    small = laid_out(Config(), Layout(row=2, col=2))
    found = Compiled(small, "TP2D=4", 3 << 30, 2 << 30, 1 << 30, moves)
    assert found.sent() == 320 + 480 + 320
    assert found.sent(axes="row x col") == 480 and found.sent(over="attention") == 320
    assert found.needs[4].startswith("col 0.00, row 0.00, row x col 0.00")
    rows = list(found.over)
    assert [row[1] for row in rows] == ["all", "all-gather", "all-reduce", "reduce-scatter"]
    assert rows[0][2:] == ["15", "0.00", "29%", "29%", "43%"]


def test_heads_that_do_not_split_become_fewer() -> None:
    large = load_config("gpt2-2.5b")
    assert laid_out(large, Layout(tp=2)).model.num_heads == 30
    assert laid_out(large, Layout(tp=4)).model.num_heads == 24
    assert laid_out(large, Layout(row=2, col=2)).model == large.model


# ---- break-even -------------------------------------------------------------------------------

MODEL = dataclasses.replace(tiny.MODEL, dtype="bfloat16")
BATCH = 2


def layer(layout: Layout) -> list[Collective]:
    """The collectives of a layer's activations and matrices, without once-per-step sums."""
    config = Config(MODEL, layout, train=TrainConfig(global_batch_size=BATCH, platform="cpu"))
    found = comms.per_layer(Program(config, make_mesh(layout)))
    return [each for each in found if each.count]


def sent(found: list[Collective], layout: Layout) -> int:
    sizes = {str(axis): n for axis, n in layout.sizes.items()}
    return sum(each.wire_bytes(sizes) for each in found)


def messages(found: list[Collective], layout: Layout) -> int:
    total = 0
    for each in found:
        others = math.prod(getattr(layout, axis) for axis in each.axes) - 1
        rounds = {"collective-permute": 1, "all-reduce": 2 * others}.get(each.kind, others)
        total += each.count * rounds
    return total


@pytest.mark.parametrize(
    ("rows", "cols"), [*(pytest.param(n, 2, marks=pytest.mark.slow) for n in (2, 4)), (2, 4)]
)
def test_what_a_layer_on_a_grid_sends_is_the_closed_form(rows: int, cols: int) -> None:
    layout, tokens = Layout(row=rows, col=cols, ring="blockwise"), BATCH * MODEL.seq_length
    found = layer(layout)
    assert sent(found, layout) == even.on_grid(rows, cols, MODEL.hidden_size).at(tokens)
    assert messages(found, layout) == even.messages_on_grid(rows, cols)
    along = [each for each in found if each.axes == ("col",)]
    assert sent(along, layout) == even.along_col(rows, cols, MODEL.hidden_size).at(tokens)


@pytest.mark.slow
def test_what_a_layer_in_1d_sends_is_the_closed_form() -> None:
    layout = Layout(tp=4, sequence_parallel=True, keep_gathered=True)
    found = layer(layout)
    tokens = BATCH * MODEL.seq_length
    assert sent(found, layout) == even.one_way(4, MODEL.hidden_size).at(tokens)
    assert messages(found, layout) == even.messages_one_way(4)


def test_break_even_of_a_square_grid_by_hand() -> None:
    assert even.cheaper(2, 2, 4096) is None and even.first(4, 4096) is None
    for q, hidden in ((3, 4096), (4, 1920), (8, 4096)):
        span = even.cheaper(q, q, hidden)
        assert span is not None
        assert span[0] == pytest.approx(96 * hidden / (16 * (q + 1) - 58 - 64 / hidden))


@pytest.mark.parametrize(
    ("links", "hidden", "row"),
    [
        (even.Links(450e9, 450e9, 450e9, 1e-7), 4096, 0),
        (even.Links(4e11, 5e10, 45e10, 1e-5), 1920, 1),
    ],
    ids=["all alike", "slow columns"],
)
def test_both_cost_the_same_at_the_break_even(links: even.Links, hidden: int, row: int) -> None:
    """With slow columns a grid is cheaper up to some number of tokens, since messages cost."""
    span = even.cheaper(8, 8, hidden, links)
    assert span is not None and span[1 - row] in (0, math.inf)
    for tokens in (span[row], span[row] * 2 ** (1 - 2 * row)):
        costs = even.on_grid(8, 8, hidden, links), even.one_way(64, hidden, links)
        on_grid, line = (cost.at(tokens) for cost in costs)
        assert on_grid == pytest.approx(line) if tokens == span[row] else on_grid < line


def test_the_page_has_the_table_of_break_evens(capsys: pytest.CaptureFixture) -> None:
    assert even.main(["--hidden", "4096"]) == 0
    assert capsys.readouterr().out in (ROOT / "docs" / "grid.md").read_text(encoding="utf-8")


# ---- the race ---------------------------------------------------------------------------------

SIZE = summa2d.Size(32, 16, 64)
MIB = 2**20


@pytest.mark.slow
def test_every_program_computes_the_pair() -> None:
    runs = summa2d.measure(SIZE, 4, steps=2)  # raises, if one does not
    ours = ["gather", "gather in 2 slices", "gather in 4 slices", "summa", "fox", "cannon"]
    peers = ["autodiff", "jit", "Megatron", "Megatron, gathering again"]
    assert [run.program.name for run in runs] == [f"jaxptd {name}" for name in ours] + peers
    assert all(len(run.seconds) == 2 and 0 < run.error <= TOLERANCE for run in runs)
    assert {len(summa2d.row(run, runs)) for run in runs} == {len(summa2d.HEAD)}


def test_another_program_is_noticed() -> None:
    right, arrays = summa2d.grid("gather", 2, 2), SIZE.random()
    other = dataclasses.replace(right, function=lambda x, w1, w2: right.function(x, 2 * w1, w2))
    run = summa2d.start(other, make_mesh(other.layout), arrays)
    with pytest.raises(DifferentError, match="jaxptd gather is .* off one device"):
        run.check(summa2d.plain(*arrays))


def kept(program: summa2d.Pair) -> float:
    """The float32 elements that a device saves."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SIZE.shapes[:3]]
    return program.kept(make_mesh(program.layout), shapes) / 4


def test_what_is_kept_for_backward_is_counted() -> None:
    M, D, F = SIZE.M, SIZE.D, SIZE.F
    local = (M * D + M * F + 2 * D * F) // 4  # x, h, w1, w2
    for algorithm in ("gather", "summa", "fox", "cannon"):
        assert kept(summa2d.grid(algorithm, 2, 2)) == local
    mesh = make_mesh(Layout(row=2, col=2))
    assert kept(summa2d.partitioned(mesh)) == local
    assert kept(summa2d.gathered(2, 2)) == 2 * local
    peers = [p for p in summa2d.programs(4) if p.layout.tp == 4]
    assert [kept(peer) for peer in peers] == [local + 3 * M * D // 4, local]


def test_bytes_are_told_apart_by_axis() -> None:
    program, M, D, F = summa2d.grid("gather", 2, 2), SIZE.M, SIZE.D, SIZE.F
    run = summa2d.start(program, make_mesh(program.layout), SIZE.random())
    # Blocks of a quarter, each sent once in forward and twice in backward; two per matmul.
    assert run.wire == {"col": 3 * (M * D + M * F), "row": 3 * 2 * D * F}
    assert run.messages == 12


def test_programs_are_held_against_the_fastest_peer() -> None:
    def fake(*seconds: float, ours: bool = False) -> Any:
        program = dataclasses.replace(summa2d.grid("gather", 2, 2), ours=ours)
        return summa2d.Run(program, None, [], seconds=[*seconds])

    slow, fast, mine = fake(4), fake(2), fake(9, 1, 1, ours=True)
    assert summa2d.share(mine, [mine, slow, fast]) == 0.5
    assert summa2d.share(slow, [mine, slow, fast]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--devices 4 10", "--devices 10 makes no grid, square or 1:2; use 4, 8 or 16"),
        ("--size 64x32x48", "M=64, D=32, F=48 does not split over 8 .*; use multiples of 32"),
        ("--size 64x32", "--size: 64x32 is not MxDxF; see --help"),
    ],
)
def test_bad_options_are_one_line(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        summa2d.main(words.split())
