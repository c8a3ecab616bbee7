"""The cost model of context parallelism: closed forms, the peer that gathers, the pictures."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from benchmarks.context import __main__ as context
from benchmarks.context import formulas, plans
from benchmarks.context import pictures as context_pictures
from jaxptd.analysis.collective import Collective
from jaxptd.attention.kernel import Dropout, Scores
from jaxptd.attention.ring import AttentionInputs, Ring
from jaxptd.attention.xla import Xla
from jaxptd.layers.dropout import keep_mask
from jaxptd.mesh import Layout, make_mesh
from jaxptd.ring_attention import attend

PLANS = plans.plans(4)
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
def test_what_a_layer_moves_is_the_closed_form(plan: plans.Plan) -> None:
    found = context.count(plan, MODEL, 2)  # raises if not
    sent = [sum(c.wire_bytes({"cp": 4, "tp": 4}) for c in each) for each in found.values()]
    again = plan.layout.sequence_parallel and not plan.layout.keep_gathered
    assert sum(sent) == (20 if again else 16) * 3 * UNIT
    if plan.layout.cp > 1:
        assert sent == [3 * formulas.hop_bytes(which) * UNIT for which in found]


@pytest.mark.slow
def test_another_traffic_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"forward": [Collective("collective-permute", ("cp",), 3, 1)], "backward": []}
    monkeypatch.setattr(context, "moves", lambda *_: wrong)
    with pytest.raises(ValueError, match="ring, zigzag, forward: .* by formula"):
        context.count(PLANS[0], MODEL, 2)


@pytest.mark.slow
def test_peer_computes_what_the_ring_computes() -> None:
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.normal(size=(3, 2, 16, 2, 4)), jnp.float32)
    seed_BN2 = jnp.asarray(rng.integers(0, 2**32, (2, 2, 2)), jnp.uint32)
    ring, kernel = Ring("cp", "blockwise"), Xla(Dropout(0.1, keep_mask), chunk=8)
    spec = P(None, None, "cp")

    def gradients(attend: Any) -> jax.Array:
        def loss(qkv: jax.Array) -> jax.Array:
            tokens = AttentionInputs(seed_BN2=seed_BN2)
            o = attend(*qkv, tokens, ring=ring, kernel=kernel, scores=Scores(0.5))
            return jnp.sum(jnp.sin(o))

        mesh = make_mesh(Layout(cp=4))
        return jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=spec, out_specs=spec))(qkv)

    expected = gradients(attend)
    assert np.linalg.norm(gradients(plans.attend_gathered) - expected) < 1e-6 * np.linalg.norm(
        expected
    )


def test_messages_of_a_ring_and_of_collectives() -> None:
    permutes = Collective("collective-permute", ("cp",), 21, 0)
    reductions = [Collective(kind, ("tp",), 2, 0) for kind in ("all-reduce", "all-gather")]
    assert formulas.messages([permutes], 8) == 21
    assert formulas.messages(reductions, 8) == 2 * 14 + 2 * 7


@pytest.mark.parametrize("ring", ["zigzag", "blockwise"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_from_the_break_even_on_a_visit_hides_its_hop(which: formulas.Pass, ring: str) -> None:
    tokens = formulas.tokens_to_hide(which, ring, link=50e9, efficiency=0.5)
    visit = formulas.visit_flops(which, ring) * tokens**2 / (0.5 * formulas.PEAK)
    assert visit == pytest.approx(formulas.hop_bytes(which) * tokens / 50e9)


def test_break_even_of_an_h200_over_nvlink() -> None:
    found = formulas.tokens_to_hide("backward", "zigzag", link=450e9, efficiency=1.0)
    assert found == pytest.approx(2.4 * 989.5e12 / 450e9)


def test_map_of_work() -> None:
    assert context_pictures.owners("zigzag", 4).tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
    assert context_pictures.work("zigzag", 4).tolist() == [8, 8, 8, 8]
    assert context_pictures.work("blockwise", 4).tolist() == [2, 6, 10, 14]


@pytest.mark.slow
def test_command_writes_the_table_and_the_same_pictures_each_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(context, "MODEL", tiny.MODEL)
    monkeypatch.setattr(context, "plans", lambda _: [PLANS[0], PLANS[2]])
    sizes = SimpleNamespace(temp_size_in_bytes=3 << 20, argument_size_in_bytes=1 << 20)
    monkeypatch.setattr(context, "memory", lambda *_: sizes)
    out = tmp_path / "context.md"
    options = ["--devices", "4", "--lengths", "8", "16", "--out", str(out)]
    assert context.main([*options, "--pictures", str(tmp_path / "one")]) == 0
    context_pictures.draw(tmp_path / "two")
    text = out.read_text(encoding="utf-8")
    assert capsys.readouterr().out == text + "\n"
    assert "| ring, rsa | 6 collective-permute | 12 collective-permute | 18 |" in text
    assert "| ring, zigzag | 1.0 | 3.0 | 3.0 |" in text
    for name in ("ring_zigzag.svg", "context_break_even.svg"):
        one, two = (tmp_path / each / name for each in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
        assert ElementTree.parse(one).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert b"<dc:date>" not in one.read_bytes()


@pytest.mark.slow
def test_memory_is_of_one_device_of_the_compiled_step() -> None:
    found = context.memory(PLANS[0], tiny.MODEL)
    state = sum(
        x.size * x.dtype.itemsize
        for x in jax.tree.leaves(PLANS[0].program(tiny.MODEL).abstract_state)
    )
    batch = 2 * tiny.MODEL.seq_length // 4 * 4  # tokens, targets
    assert found.argument_size_in_bytes == state + batch
    assert found.temp_size_in_bytes > 0
