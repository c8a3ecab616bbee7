"""Names that `import jaxptd` exports: documented, typed, the same in any order of imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxptd
import jaxptd.verify as verify_module
from jaxptd import plot

NAMES = [name for name in jaxptd.__all__ if name != "__version__"]
EXAMPLES = ("Config", "Layout", "Program", "Run", "describe_mesh", "load", "load_config")
EXAMPLES += ("load_tokenizer", "make_mesh", "make_schedule", "open_data", "rank_groups")
EXAMPLES += ("grouped_matmul", "simulate")
FUNCTIONS = ("comms", "generate", "memory", "plan", "profile", "train", "verify")

ORDERS = """
import sys
import jaxptd
from jaxptd import verify
import jaxptd.verify
assert jaxptd.verify is verify is sys.modules["jaxptd.verify"] and callable(verify)
from jaxptd.verify import verify as function
assert verify.verify is function
import jaxptd.comms
from jaxptd import comms
assert jaxptd.comms is comms and callable(comms) and comms.count
import jaxptd.train as train
assert callable(train) and train.main and jaxptd.train is train
"""


def typed_names() -> set[str]:
    """Names that `jaxptd/__init__.py` imports for type checkers."""
    tree = ast.parse(Path(jaxptd.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {alias.asname or alias.name for node in block.body for alias in node.names}


def test_type_checkers_see_what_is_exported() -> None:
    assert typed_names() == set(NAMES)
    assert dir(jaxptd) == sorted(jaxptd.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_and_documented(name: str) -> None:
    found = getattr(jaxptd, name)
    assert name == "SCHEDULES" or found.__doc__


@pytest.mark.parametrize("name", sorted(FUNCTIONS + EXAMPLES))
def test_it_has_an_example(name: str) -> None:
    found = getattr(jaxptd, name)
    found = getattr(found, name) if name in FUNCTIONS else found
    assert ">>> " in found.__doc__


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_module_is_called_like_its_function(name: str, monkeypatch) -> None:
    module = getattr(jaxptd, name)
    assert module is sys.modules[f"jaxptd.{name}"]
    monkeypatch.setattr(module, name, lambda *args, **kwargs: (args, kwargs))
    assert module("config", option=1) == (("config",), {"option": 1})


def test_a_callable_module_shows_its_functions_signature() -> None:
    assert list(verify_module.__signature__.parameters) == ["config", "dtype"]


@pytest.mark.slow
def test_any_order_of_imports_gives_the_same() -> None:
    subprocess.run([sys.executable, "-c", ORDERS], check=True, cwd=Path(jaxptd.__file__).parents[1])


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fit'"):
        _ = jaxptd.fit
    with pytest.raises(AttributeError, match="no attribute 'pie'"):
        _ = plot.pie
