"""The call chain from the training command to the first matmul is short enough to read."""

import sys
from pathlib import Path

import jax
import pytest

import jaxptd
from jaxptd.train import main

ROOT = Path(__file__).parents[2]
PACKAGE = Path(jaxptd.__file__).parent
LONGEST = 15  # functions from `main` to the one that multiplies
BELOW = ("step/", "models/", "layers/", "zero/")  # what the training loop calls


class FoundError(Exception):
    """Ends the run at its first matmul."""


def chain() -> list[str]:
    """The package's functions on the stack, outermost first, such as `train.py main`.

    Nested functions and lambdas do not count, as they are read with the outer function.
    """
    found, frame = [], sys._getframe()
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if path.is_relative_to(PACKAGE) and "<" not in name:  # <locals>, <lambda>
            found.append(f"{path.relative_to(PACKAGE)} {name}")
        frame = frame.f_back
    return found[::-1]


def test_few_functions_lie_between_the_command_and_the_first_product(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise FoundError("\n".join(chain()))

    monkeypatch.setattr(jax.lax.dot_general_p, "bind", stop)
    (tmp_path / "text.txt").write_text("some text\n" * 400)
    values = {
        "data.source": tmp_path / "text.txt",
        "train.run_dir": tmp_path / "run",
        "model.hidden_size": 24,  # differs from all other tests, so that nothing is cached
    }
    options = [f"--{key}={value}" for key, value in values.items()]
    with pytest.raises(FoundError) as caught:
        main(["--config", str(ROOT / "configs" / "test-tiny.yaml"), *options])
    functions = str(caught.value).splitlines()
    functions = functions[: functions.index("layers/tensor_parallel.py matmul") + 1]
    assert functions[0] == "train.py main"
    assert [each for each in functions if not each.startswith(BELOW)] == functions[:2]
    assert len(functions) <= LONGEST, f"{len(functions)} functions:\n{caught.value}"
