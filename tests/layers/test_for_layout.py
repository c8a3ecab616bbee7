"""Kinds of tensor parallelism: which one a layout gets, and that each is abstract or final."""

import dataclasses

import pytest

from jaxptd.layers.for_layout import for_decoding, make_tensor_parallel
from jaxptd.layers.grid import DecodeGrid2D, Grid2D
from jaxptd.layers.megatron import CollectiveMatmul1D, TensorParallel1D
from jaxptd.layers.tensor_parallel import TensorParallel
from jaxptd.mesh import Layout

STEPS = Layout(tp=4, sequence_parallel=True, collective_matmul=True)
KINDS = [
    (make_tensor_parallel(Layout()), TensorParallel1D),
    (make_tensor_parallel(Layout(tp=4, sequence_parallel=True)), TensorParallel1D),
    (make_tensor_parallel(STEPS), CollectiveMatmul1D),
    (for_decoding(STEPS), TensorParallel1D),
    (make_tensor_parallel(Layout(row=2, col=2)), Grid2D),
    (for_decoding(Layout(row=2, col=2)), DecodeGrid2D),
]


@pytest.mark.parametrize(("tensor_parallel", "kind"), KINDS)
def test_each_overrides_abstract_methods_only(tensor_parallel: TensorParallel, kind: type) -> None:
    assert type(tensor_parallel) is kind
    for cls in kind.__mro__[:-1]:
        names = [name for name in vars(cls) if callable(vars(cls)[name]) and name[0] != "_"]
        for name, base in ((n, b) for n in names for b in cls.__mro__[1:] if n in vars(b)):
            assert getattr(vars(base)[name], "__isabstractmethod__", False), (cls, name, base)


def test_layers_see_a_small_interface() -> None:
    public = {name for name in dir(TensorParallel) if not name.startswith("_")}
    assert len(public | {field.name for field in dataclasses.fields(TensorParallel)}) <= 17
