"""The reference's backward pass against complex-step derivatives; and its independence."""

import ast
from pathlib import Path

import numpy as np
import pytest
import reference
from reference.cases import (
    BERT,
    GPT,
    MORE,
    QWEN,
    SEED,
    T5,
    WITH_EXPERTS,
    WITH_LATENTS,
    Case,
    batches,
    start,
)
from reference.draws import Masks, threefry
from reference.families import MODELS
from reference.optimizers import counts
from reference.tape import Value
from reference.training import loss_and_gradients
from turns import slow

STEP = 1e-30  # may be arbitrarily small, as nothing is subtracted
ROUNDING = 1e-12
POST = next(case for case in MORE if "norm_order" in case.fields)


@pytest.mark.parametrize(
    "case",
    [GPT, QWEN, BERT, T5, POST, WITH_EXPERTS[0], *map(slow, WITH_EXPERTS[1:]), *WITH_LATENTS],
    ids=str,
)
def test_gradients_are_derivatives_along_complex_steps(case: Case) -> None:
    """A bias that only chooses has no slope; counts of tokens replace its gradient."""
    params, batch = start(case), batches(case)[0]
    masks, rng = Masks(SEED, 0, 0.2), np.random.default_rng(0)
    _, grads = loss_and_gradients(case.family, params, batch, case.known, masks)
    for name in params:
        along = rng.standard_normal(params[name].shape)
        moved = {**params, name: params[name] + 1j * STEP * along}
        values = {each: Value(p) for each, p in moved.items()}
        slope = MODELS[case.family](values, batch, case.known, masks)[0].x.imag / STEP
        if counts(name):
            assert slope == 0
            continue
        size = np.linalg.norm(grads[name]) * np.linalg.norm(along)
        assert abs(slope - (grads[name] * along).sum()) <= ROUNDING * size, name


def test_threefry_is_that_of_its_authors() -> None:
    """Known answers from Random123's `kat_vectors` for threefry2x32 with 20 rounds."""
    assert threefry((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    ones = 2**32 - 1
    assert threefry((ones, ones), (ones, ones)) == (0x1CB996FC, 0xBB002BE7)
    key, counter = (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)
    assert threefry(key, counter) == (0xC4923A9C, 0x483DF7A0)


def test_the_reference_imports_numpy_and_the_standard_library_only() -> None:
    files = [path for path in Path(reference.__path__[0]).glob("*.py") if path.stem != "cases"]
    found = set()
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    known = {"collections", "dataclasses", "enum", "itertools", "math", "numpy", "typing"}
    assert found <= known | {"reference"}
    assert len(files) > 5
