"""Checks that the program compiled for inspection is the one that would run."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax import lax
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.analysis.compiled_step import UNOPTIMISED, compile_to_read
from jaxptd.analysis.jaxprs import traced
from jaxptd.mesh import Layout, make_mesh

OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def sizes(compiled: Any) -> tuple[int, int]:
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes, memory.argument_size_in_bytes


def serialised(compiled: Any) -> bytes:
    """The executable, with its options."""
    executable = compiled.runtime_executable()
    return executable.client.serialize_executable(executable)


def little() -> Any:
    """A step with a matmul, operations that can be fused, and a sum over devices."""
    mesh = make_mesh(Layout(tp=4))
    step = jax.shard_map(
        lambda w, x: w - lax.psum(2 * jnp.sin(x @ w), "tp"),
        mesh=mesh,
        in_specs=(P(), P("tp")),
        out_specs=P(),
    )
    array = jax.ShapeDtypeStruct((8, 8), "float32")
    return SimpleNamespace(
        mesh=mesh,
        train_step=jax.jit(step),
        abstract_state=array,
        abstract_batch=jax.ShapeDtypeStruct((32, 8), "float32"),
    )


@pytest.mark.parametrize(
    "make", [little, slow(lambda: tiny.program(Layout(dp=2, tp=2)))], ids=["little", "step"]
)
def test_code_that_is_not_optimised_needs_the_same_memory_and_sends_the_same(make: Any) -> None:
    program = make()
    optimised, not_optimised = (
        traced(program).lower().compile(compiler_options=options)
        for options in (OPTIMISED, UNOPTIMISED)
    )
    read = compile_to_read(program)
    assert sizes(read) == sizes(optimised)
    assert read.as_text() == optimised.as_text()
    assert serialised(read) == serialised(not_optimised) != serialised(optimised)


def test_options_of_the_caller_are_added() -> None:
    program = little()
    passes = {"xla_disable_hlo_passes": "fusion"}
    apart, fused = (compile_to_read(program, each).as_text() for each in (passes, None))
    assert ("fused_computation" in apart, "fused_computation" in fused) == (False, True)
