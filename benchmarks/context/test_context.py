"""Sharded sequences: closed forms, the peer that gathers, long sequences, and the race of rings."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import Mesh, NamedSharding

from benchmarks.context import __main__ as context
from benchmarks.context import costs, documents, long_context, overlap, ring
from benchmarks.lib.compiler import QUICK
from benchmarks.lib.pages import RESULTS
from benchmarks.lib.timing import TOLERANCE
from jaxptd.analysis.hlo.timeline import Move, Work
from jaxptd.commands.command_line import load_config
from jaxptd.costs.collective import Collective
from jaxptd.errors import UserError
from jaxptd.mesh import Layout, RingKind, make_mesh

PLANS = costs.plans(4)
MODEL = dataclasses.replace(tiny.MODEL, dtype="bfloat16")
UNIT = 2 * MODEL.seq_length * MODEL.hidden_size / 4  # elements of a block of q, a batch of two


@pytest.mark.parametrize(
    "plan",
    [
        *(pytest.param(plan, marks=pytest.mark.slow) for plan in (*PLANS[:2], *PLANS[4:])),
        *PLANS[2:4],
    ],
    ids=lambda plan: plan.name,
)
def test_what_a_layer_moves_is_the_closed_form(plan: costs.Plan) -> None:
    found = costs.count(plan, MODEL, 2)  # raises if not
    sent = [sum(c.wire_bytes({"cp": 4, "tp": 4}) for c in each) for each in found.values()]
    again = plan.layout.sequence_parallel and not plan.layout.keep_gathered
    assert sum(sent) == (20 if again else 16) * 3 * UNIT
    if plan.layout.cp > 1:
        assert sent == [3 * costs.hop_bytes(which) * UNIT for which in found]


@pytest.mark.slow
def test_another_traffic_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"forward": [Collective("collective-permute", ("cp",), 3, 1)], "backward": []}
    monkeypatch.setattr(costs, "moves", lambda *_: wrong)
    with pytest.raises(ValueError, match="ring, zigzag, forward: .* by formula"):
        costs.count(PLANS[0], MODEL, 2)


@pytest.mark.parametrize("kind", ["zigzag", "blockwise"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_from_the_break_even_on_a_visit_hides_its_hop(which: costs.Pass, kind: str) -> None:
    tokens = costs.tokens_to_hide(which, kind, link=50e9, efficiency=0.5)
    visit = costs.visit_flops(which, kind) * tokens**2 / (0.5 * costs.PEAK)
    assert visit == pytest.approx(costs.hop_bytes(which) * tokens / 50e9)


def test_what_follows_from_closed_forms_is_as_published() -> None:
    assert context.hiding_table() in (RESULTS / "context.md").read_text(encoding="utf-8")
    permutes = Collective("collective-permute", ("cp",), 21, 0)
    reductions = [Collective(kind, ("tp",), 2, 0) for kind in ("all-reduce", "all-gather")]
    assert costs.messages([permutes], 8) == 21
    assert costs.messages(reductions, 8) == 2 * 14 + 2 * 7


@pytest.mark.slow
def test_the_command_writes_its_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(context, "MODEL", tiny.MODEL)
    monkeypatch.setattr(context, "plans", lambda _: [PLANS[0], PLANS[2]])
    out = tmp_path / "context.md"
    assert context.main(["--devices", "4", "--lengths", "8", "16", "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert "| ring, rsa | 6 collective-permute | 12 collective-permute | 18 |" in text


# ---- long sequences -----------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_of_a_ring_is_linear_and_of_rsa_quadratic() -> None:
    wanted = {("zigzag", 2): (8192, 32768), ("zigzag", 4): (32768,), ("rsa", 2): (1024, 2048)}
    points = {
        (kind, cp): {length: long_context.temporary_bytes(length, cp, kind) for length in lengths}
        for (kind, cp), lengths in wanted.items()
    }
    assert 0.7 < long_context.exponent(points["zigzag", 2]) < 1.1
    assert 1.7 < long_context.exponent(points["rsa", 2]) < 2.1
    assert 1.4 < points["zigzag", 2][32768] / points["zigzag", 4][32768] < 2.1


def test_table_and_picture_of_points(tmp_path: Path) -> None:
    points = {("zigzag", 1): {64: 2**20, 128: 2**21}, ("rsa", 8): {32: 2**20, 64: 2**22}}
    _, zigzag, rsa = long_context.rows(points)
    assert zigzag == ["zigzag", "1", "", "1.0", "2.0", "T^1.00"]
    assert rsa == ["rsa", "8", "1.0", "4.0", "", "T^2.00"]
    long_context.draw(points, tmp_path / "x.svg")
    assert "rsa, cp=8" in (tmp_path / "x.svg").read_text()


def test_lengths_double_until_one_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler: a step needs ten GiB, plus one for each 1024 tokens and 1000 ids."""

    def need(config: Any) -> long_context.Need:
        size = config.model.seq_length / 1024 * config.model.vocab_size / 1000 / 50
        return long_context.Need(config, 10 + size, 10, size)

    monkeypatch.setattr(long_context, "need", need)
    long = load_config("gpt-1.3b-131k", ["--model.vocab_size=50000"])
    found = list(long_context.longest(long))
    assert [each.config.model.seq_length for each in found] == [2**17, 2**18]
    assert [each.fits for each in found] == [True, False]
    page = long_context.on_gpus(long)
    assert "Longest that fits: T=131,072. With half the vocabulary the peak there is" in page
    assert "Nothing fits." in long_context.on_gpus(long_context.with_model(long, seq_length=2**20))
    tokens = long.model.seq_length // long.layout.cp  # cuDNN holds each element of dq in float32
    assert found[0].workspace == 4 * tokens * long.model.hidden_size / 2**30


def test_permutes_that_are_alike_are_one_row() -> None:
    found = [Move(name, "forward", 2**20, 3, Work(2)) for name in "ab"]
    found.append(Move("c", "backward", 2**21, 1, Work()))
    assert overlap.rows(found) == [
        ("forward", "6", "1", "2", "0", "attention"),
        ("backward", "1", "2", "0", "0", "nothing"),
    ]
    words = "over attention 6 (6 MiB), over matmuls 0 (0 MiB), over nothing 1 (2 MiB)."
    assert words in overlap.summary(found)


# ---- the race -----------------------------------------------------------------------------------

SIZE = ring.Size(1, 32, 2, 4)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(Layout(cp=4))


@pytest.mark.slow
def test_every_program_computes_attention(mesh: Mesh) -> None:
    runs = ring.measure(SIZE, mesh, chunks=[4], steps=2)  # raises, if one does not
    names = ["jaxptd zigzag", "jaxptd blockwise", "jaxptd rsa", "gather", "jit"]
    installed = all(map(importlib.util.find_spec, ("ringattention", "einops")))
    assert [run.program.name for run in runs] == names + ["ringattention"] * installed
    assert all(len(run.seconds) == 2 and 0 < run.error <= TOLERANCE for run in runs)
    text = ring.section(SIZE, runs)
    assert (ring.INSTALL in text) is not installed
    zigzag = next(line for line in text.splitlines() if "jaxptd zigzag" in line)
    assert zigzag.count("**") == 4 and "collective-permute" in zigzag


def fake(name: str, *, ours: bool, temp: int, chunk: int | None = None) -> Any:
    class Fake(ring.Run):
        @property
        def temp(self) -> float:
            return temp

    program = ring.Attention(name, lambda q, k, v: q, chunk=chunk, ours=ours)
    return Fake(program, None, [], np.arange(1), "", seconds=[temp / 100])


def test_ours_is_held_against_the_best_peer_of_its_chunk() -> None:
    peers = [fake("a", ours=False, temp=400), fake("b", ours=False, temp=200, chunk=8)]
    peers.append(fake("c", ours=False, temp=50, chunk=2))
    mine = fake("mine", ours=True, temp=100, chunk=8)
    for name in ("temp", "median"):
        assert ring.share(mine, [mine, *peers], name) == 0.5
    assert ring.share(peers[0], [mine, *peers], "temp") is ring.share(mine, [mine], "temp") is None


@pytest.mark.parametrize("devices", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_work_is_balanced_by_zigzag_and_by_nothing_else(devices: int) -> None:
    assert ring.balance("zigzag", devices, 64) <= ring.MOST_WORK
    # The last of n contiguous chunks sees n - 1 whole blocks and three quarters of its own, the
    # mean one (n - 1) / 2.
    contiguous = ring.balance("blockwise", devices, 64)
    assert contiguous == pytest.approx((4 * devices - 1) / (2 * devices + 1), rel=0.01)


@pytest.mark.parametrize("kind", ["zigzag", pytest.param("blockwise", marks=pytest.mark.slow)])
def test_scores_of_a_whole_block_are_never_in_memory(kind: RingKind) -> None:
    """Those of a block of 256 tokens and 4 heads would be 1 MiB, in backward twice."""
    mesh = make_mesh(Layout(cp=8))
    sharding = NamedSharding(mesh, ring.CUT)
    each: Any = jax.ShapeDtypeStruct((1, 2048, 4, 32), jnp.float32, sharding=sharding)
    lowered = ring.ours(kind, 512).gradients(mesh).lower(*[each] * 4)
    compiled = lowered.compile(compiler_options=QUICK)
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 2**20


def test_length_that_no_zigzag_splits_is_refused() -> None:
    with pytest.raises(UserError, match="--length 100 does not split into 16 chunks"):
        ring.main(["--length", "100"])


# ---- packed documents ---------------------------------------------------------------------------


def test_documents_follow_one_another_and_have_the_mean_length() -> None:
    numbers = np.asarray(documents.documents(256)[0])
    assert numbers.shape == (documents.T,)
    assert set(np.diff(numbers)) == {0, 1}
    assert 0.7 < documents.T / len(set(numbers)) / 256 < 1.4
