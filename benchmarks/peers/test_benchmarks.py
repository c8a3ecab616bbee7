"""The benchmarks: the peer computes what jaxptd computes, and programs are priced rightly."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.lib.partitioned import plain_groups, with_reduce_scatters
from benchmarks.peers import step
from jaxptd.analysis.hlo import collectives_from_hlo
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.errors import UserError
from jaxptd.mesh import Layout

MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, seq_length=8, vocab_size=16)


def config(layout: Layout, **model: object) -> Config:
    sizes = dataclasses.replace(MODEL, **model)
    train = TrainConfig(global_batch_size=4)
    return Config(model=sizes, layout=layout, optimizer=step.OPTIMIZER, train=train)


@pytest.mark.parametrize(
    ("layout", "scan_layers"),
    [
        pytest.param(Layout(dp=2, tp=4, sequence_parallel=True), True, marks=pytest.mark.slow),
        pytest.param(Layout(dp=2, tp=2), False, marks=pytest.mark.slow),
    ],
    ids=["dp x tp, sequence parallel, scan", "dp x tp, unrolled"],
)
def test_peer_computes_the_same(layout: Layout, scan_layers: bool) -> None:
    runs = step.Pair(config(layout, scan_layers=scan_layers)).start()
    step.check_same(runs)  # raises, if not to 1e-5, for three steps
    assert [len(run.seconds) for run in runs] == [3, 3]


@pytest.mark.slow
def test_another_program_is_noticed() -> None:
    ours, peer = step.Pair(config(Layout(dp=2, tp=2), scan_layers=False)).start()
    peer.batch = {name: x[:, ::-1] for name, x in peer.batch.items()}
    with pytest.raises(step.DifferentError, match="step 0: loss is"):
        step.check_same((ours, peer))


def test_row_sets_both_programs_side_by_side() -> None:
    ours, peers = step.Numbers(0.2, 0.1, 2**20, 0, 0), step.Numbers(0.4, 0.4, 2**22, 0, 0)
    cells = step.row(config(Layout(dp=2)), ours, peers)
    assert cells[:3] == ["dp=2", "scan", "none"]
    assert cells[3:6] == [
        "0.200 / 0.400 = **0.50**",
        "0.100 / 0.400 = **0.25**",
        "1.0 / 4.0 = **0.25**",
    ]
    assert len(cells) == len(step.HEAD)


def test_groups_of_a_partitioner_mesh_become_lists() -> None:
    text = "replica_groups=mesh['a'=2,'b'=4] {'a'}, x"
    assert plain_groups(text) == "replica_groups={{0,4},{1,5},{2,6},{3,7}}, x"
    text = "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}"
    assert plain_groups(text) == "replica_groups={{0,2,4,6},{1,3,5,7}}"
    text = "replica_groups=mesh['a'=8] {'a':(2)2}"  # the middle factor of 2 x 2 x 2
    assert plain_groups(text) == "replica_groups={{0,2},{1,3},{4,6},{5,7}}"


def test_sliced_all_reduce_counts_as_reduce_scatter() -> None:
    """XLA on CPU sums a product of sharded matrices whole, and slices the sharded result."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    lay = [NamedSharding(mesh, spec) for spec in (P(None, "tp"), P("tp", None), P("tp", None))]
    product = jax.jit(jnp.matmul, in_shardings=lay[:2], out_shardings=lay[2])
    text = product.lower(jnp.ones((8, 64)), jnp.ones((64, 32))).compile().as_text()
    (found,) = collectives_from_hlo(with_reduce_scatters(text), {"dp": 2, "tp": 4})
    assert (found.kind, found.axes, found.bytes) == ("reduce-scatter", ("tp",), 8 * 32 * 4)
    whole = jax.jit(jnp.matmul, in_shardings=lay[:2], out_shardings=NamedSharding(mesh, P()))
    text = whole.lower(jnp.ones((8, 64)), jnp.ones((64, 32))).compile().as_text()
    (found,) = collectives_from_hlo(with_reduce_scatters(text), {"dp": 2, "tp": 4})
    assert (found.kind, found.bytes) == ("all-reduce", 8 * 32 * 4)


def test_unknown_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="invalid choice: 'qq'"):
        step.main(["--layouts", "qq", "--out", str(tmp_path / "x.md")])
    assert not list(tmp_path.iterdir())
