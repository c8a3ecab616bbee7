"""Counts the matmuls that each device of a mesh executes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxptd.analysis.device_flops import work_per_device
from jaxptd.mesh import Layout, make_mesh


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(Layout(cp=4))


def counted(f: Callable[[Array], Array], mesh: Mesh) -> list[int]:
    """Matmuls of each device, in units of one matmul of 4 x 4 matrices."""
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    work = work_per_device(jax.jit(mapped).trace(jnp.ones((4, 4))).jaxpr, mesh)
    return (work.ravel() / (2 * 4**3)).tolist()


def test_branch_of_each_device_is_counted(mesh: Mesh) -> None:
    def f(x: Array) -> Array:
        return lax.cond((lax.axis_index("cp") + 2) % 4 < 1, lambda: x @ x @ x, lambda: x)

    assert counted(f, mesh) == [0, 0, 2, 0]


def test_branch_of_each_step_is_counted(mesh: Mesh) -> None:
    def f(x: Array) -> Array:
        def step(x: Array, number: Array) -> tuple[Array, None]:
            x = x @ x
            return lax.cond(number > lax.axis_index("cp"), lambda: x @ x, lambda: x), None

        return lax.scan(step, x, np.arange(3))[0]

    assert counted(f, mesh) == [3 + 2, 3 + 1, 3, 3]


def test_counter_of_a_loop_is_known(mesh: Mesh) -> None:
    def f(x: Array) -> Array:
        last = lax.axis_index("cp")
        return lax.while_loop(lambda c: c[0] < last, lambda c: (c[0] + 1, c[1] @ x), (0, x))[1]

    assert counted(f, mesh) == [0, 1, 2, 3]


def test_products_are_whole_ones(mesh: Mesh) -> None:
    def f(x: Array) -> Array:
        return jnp.einsum("bij,bjk->ik", jnp.ones((3, 4, 4)), jnp.tril(jnp.ones((3, 4, 4)))) + x

    assert counted(f, mesh) == [3] * 4


def test_work_that_depends_on_data_is_refused(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"depend on data: branches of \[0, 128\] FLOPs"):
        counted(lambda x: lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x), mesh)
    with pytest.raises(ValueError, match="a matmul in a while loop"):
        counted(lambda x: lax.while_loop(lambda y: y[0, 0] > 0, lambda y: y @ y, x), mesh)
    assert counted(lambda x: lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x.T @ x), mesh) == [1] * 4
    with pytest.raises(ValueError, match="outside every shard_map"):
        work_per_device(jax.jit(jnp.matmul).trace(jnp.ones((4, 4)), jnp.ones((4, 4))).jaxpr, mesh)
