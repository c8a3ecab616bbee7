"""Pages keep their words, options are read, programs of XLA's partitioner are priced rightly."""

import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.lib.compiler import UNTRIED, compiler_options
from benchmarks.lib.pages import RESULTS, TABLE, VERSIONS, joined, renew
from benchmarks.lib.partitioned import plain_groups, with_reduce_scatters
from jaxptd.analysis.hlo import collectives_from_hlo
from jaxptd.analysis.report import table, versions
from jaxptd.errors import UserError


def test_a_page_keeps_its_words_and_gets_new_tables(tmp_path: Path) -> None:
    path, new = tmp_path / "page.md", table([["a", "b"], ["3", "4"]])
    renew(path, joined("# A page", "2026-01-02; Python 3.1, jax 0.1; 2 CPU cores, x. More.", new))
    words = path.read_text().replace("| 3 | 4 |", "| 1 | 2 |") + "\nWords.\n"
    path.write_text(words)
    renew(path, joined("# Another", versions(), new))
    assert path.read_text() == VERSIONS.sub(versions(), words).replace("| 1 | 2 |", "| 3 | 4 |")
    with pytest.raises(UserError, match="has 1 tables, not 2; write to another folder"):
        renew(path, joined(new, new))


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_tables_of_a_page_are_found(page: Path, tmp_path: Path) -> None:
    """A page that is made again of its own tables is the same."""
    text, copy = page.read_text(encoding="utf-8"), tmp_path / page.name
    copy.write_text(text, encoding="utf-8")
    renew(copy, joined(*TABLE.findall(text)))
    assert copy.read_text(encoding="utf-8") == text


def test_compiler_option_without_a_value_is_refused() -> None:
    assert compiler_options(["a=b=c", "d=1"]) == {"a": "b=c", "d": "1"}
    with pytest.raises(UserError, match="--compiler fast: write it as name=value"):
        compiler_options(["fast"])


def test_the_stand_in_for_an_assembler_writes_the_file_that_is_asked_for(tmp_path: Path) -> None:
    ptxas = Path(UNTRIED["xla_gpu_cuda_data_dir"]) / "bin" / "ptxas"
    asked = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True)
    assert "release 13" in asked.stdout
    made = tmp_path / "code"
    subprocess.run([ptxas, tmp_path / "kernel.ptx", "-o", made, "-arch=sm_90a"], check=True)
    assert made.exists()


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
    lay = [NamedSharding(mesh, spec) for spec in (P(None, "tp"), P("tp", None))]
    for result, kind in ((P("tp", None), "reduce-scatter"), (P(), "all-reduce")):
        out = NamedSharding(mesh, result)
        product = jax.jit(jnp.matmul, in_shardings=lay, out_shardings=out)
        text = product.lower(jnp.ones((8, 64)), jnp.ones((64, 32))).compile().as_text()
        (found,) = collectives_from_hlo(with_reduce_scatters(text), {"dp": 2, "tp": 4})
        assert (found.kind, found.axes, found.bytes) == (kind, ("tp",), 8 * 32 * 4)
