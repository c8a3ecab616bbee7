"""The forms of tensor parallelism: which one a layout gets, and that each is abstract or final."""

import dataclasses

import pytest

from jaxptd.layers.form import TensorParallel
from jaxptd.layers.forms import for_decoding, make_form
from jaxptd.layers.grid import DecodeGrid2D, Grid2D
from jaxptd.layers.megatron import Megatron1D, RingSteps1D
from jaxptd.mesh import Layout

STEPS = Layout(tp=4, sequence_parallel=True, collective_matmul=True)
FORMS = [
    (make_form(Layout()), Megatron1D),
    (make_form(Layout(tp=4, sequence_parallel=True)), Megatron1D),
    (make_form(STEPS), RingSteps1D),
    (for_decoding(STEPS), Megatron1D),
    (make_form(Layout(row=2, col=2)), Grid2D),
    (for_decoding(Layout(row=2, col=2)), DecodeGrid2D),
]


@pytest.mark.parametrize(("form", "kind"), FORMS)
def test_a_form_overrides_abstract_methods_only(form: TensorParallel, kind: type) -> None:
    assert type(form) is kind
    for cls in kind.__mro__[:-1]:
        names = [name for name in vars(cls) if callable(vars(cls)[name]) and name[0] != "_"]
        for name, base in ((n, b) for n in names for b in cls.__mro__[1:] if n in vars(b)):
            assert getattr(vars(base)[name], "__isabstractmethod__", False), (cls, name, base)


def test_layers_see_a_small_interface() -> None:
    public = {name for name in dir(TensorParallel) if not name.startswith("_")}
    assert len(public | {field.name for field in dataclasses.fields(TensorParallel)}) <= 15
