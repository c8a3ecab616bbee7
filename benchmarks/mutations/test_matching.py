"""Patterns are found by syntax, whatever the names of locals and the layout of the code."""

import ast
import symtable
from collections.abc import Iterator

import pytest

from benchmarks.mutations.matching import Change, changed
from benchmarks.mutations.names import COMPREHENSION, FUNCTION, Names
from benchmarks.mutations.table import ROOT, mutations
from jaxptd.errors import UserError

TEXT = '''
from jax import lax

SIZE = 4


class Ring:
    hops: int = 2

    def send(self, x, axis):
        """Sends x."""
        y = lax.ppermute(
            x,  # all of it
            axis, [(i, (i + 1) % SIZE) for i in range(SIZE)]
        )
        z = y - x
        y = y + 1
        return {'sum': y + x + z}

    def twice(self, x):
        def inner(y):
            return self.send(x, y)
        total = inner(x)
        total = total + 1
        return inner(total)


def mean(values, scale):
    return sum(value * scale for value in values) / len(values)


def apply(x, sum):
    return sum(x)
'''
COMPREHENSIONS = ("listcomp", "setcomp", "dictcomp", "genexpr")
HOPS = "[(k, (k + 1) % SIZE) for k in range(SIZE)]"


def after(where: str, old: str, new: str, given: str = "") -> str:
    """The lines of the text after a change."""
    lines = changed(TEXT, Change(where, old, new, given)).splitlines()
    return "; ".join(line.strip() for line in lines if line not in TEXT.splitlines())


@pytest.mark.parametrize(
    ("where", "old", "new", "line"),
    [
        # Layout, quotes and parentheses mean nothing, and locals have other names.
        ("Ring.send", 'return {"sum":\n(a + b) + c}', "return a", "return y"),
        ("Ring.send", "low - high", "high - low", "z = (x - y)"),
        ("Ring.send", "a = b - c", "a = c", "z = x"),
        ("mean", "sum(v * m for v in vs)", "sum(vs)", "return (sum(values)) / len(values)"),
        (
            "Ring.send",
            HOPS,
            HOPS.replace("+", "-"),
            "axis, ([(k, (k - 1) % SIZE) for k in range(SIZE)])",
        ),
        # Statements: one, neighbours, none left.
        ("Ring.send", "a = b - c\nb = b + 1", "a = b", "z = y"),
        ("Ring.twice.inner", "return self.send(a, b)", "", "pass"),
        ("Ring.twice", "t = t + 1", "", ""),
        # A class is meant without its methods, and so is the module.
        ("Ring", "hops: int = 2", "hops: int = 3", "hops: int = 3"),
        ("", "SIZE = 4", "SIZE = 5", "SIZE = 5"),
        # The new text may read parameters, bind names, and import.
        ("Ring.twice", "return f(t)", "return f(x)", "return inner(x)"),
        ("Ring.twice", "return f(t)", "y = f(t)\nreturn y", "y = inner(total); return y"),
        ("Ring.twice", "return f(t)", "import os\nreturn os", "import os; return os"),
        # `sum` is a local name here, so that a pattern calls it something else.
        ("apply", "call(a)", "a", "return (x)"),
    ],
)
def test_a_place_is_found_and_changed(where: str, old: str, new: str, line: str) -> None:
    assert after(where, old, new) == line


def test_given_has_names_that_the_place_has_not_and_tells_places_apart() -> None:
    with pytest.raises(UserError, match="has scale, which"):
        after("apply", "call(a)", "call(scale)")
    assert after("Ring.send", "a + 1", "b", "b = a - c") == "y = (z)"
    with pytest.raises(UserError, match="'a \\+ 1' 2 times, not once"):
        after("Ring.send", "a + 1", "a")
    assert after("Ring.send", "a + 1", "a", "a - b") == "y = (y)"
    with pytest.raises(UserError, match="0 times"):
        after("Ring.send", "a - b", "a", "b + 1")  # b is x, to which nothing is added


@pytest.mark.parametrize(
    ("where", "old", "new", "words"),
    [
        ("Ring.send", "lax.psum(a, b, c)", "a", "Ring.send has 'lax.psum(a, b, c)' 0 times"),
        ("Ring.send", "a.ppermute(b, c, d)", "b", "0 times"),  # lax is no local name
        ("Ring.send", "a - a", "a", "0 times"),  # one name for two
        ("mean", "sum(v * v for v in vs)", "0", "0 times"),
        ("mean", "max(v * m for v in vs)", "0", "0 times"),  # max is no local name
        ("apply", "sum(a)", "a", "0 times"),
        ("Ring.send", "lax.ppermute(x=a)", "a", "0 times"),
        ("Ring.twice", "f(a)", "a", "2 times, not once"),
        ("Ring", "self.send(a, b)", "a", "0 times"),
        ("Ring.sends", "a", "b", "nothing is named Ring.sends"),
        ("Ring.send", "a - b", "a - c", "'a - c' has c, which neither old nor given has there"),
        ("Ring.send", "a - b", "(a - b)", "changes nothing"),
        ("Ring.twice.inner", "self", "x = 1", "times"),
        ("mean", "return a / b", "return [a for values in ()]", "0 times"),
    ],
)
def test_what_has_not_one_place_or_no_meaning_is_refused(where, old, new, words) -> None:
    with pytest.raises(UserError) as raised:
        after(where, old, new)
    assert words in str(raised.value)


def test_a_new_text_reads_what_can_be_read_there() -> None:
    text = "def f(x, y):\n    z = x + y\n    return sorted(x, key=lambda x: x.a)\n"
    assert "return (x)" in changed(text, Change("f", "sorted(a, key=lambda b: b.a)", "a"))
    for given in ("b.a", "lambda b: b.a"):  # b is the lambda's
        with pytest.raises(UserError, match="has b, which neither old nor given has there"):
            changed(text, Change("f", "a + c", "a + b", given))
    with pytest.raises(UserError, match="has q, which neither"):
        changed("def f(x):\n    return x, lambda q: q\n", Change("f", "a, lambda b: b", "q"))


def test_one_name_stands_for_one_local_in_the_whole_pattern() -> None:
    text = "def f(a, b):\n    return [a + b, a - b, b - a]\n"
    both = [changed(text, Change("f", old, "0")) for old in ("[p + q, p - q, q - p]", "p + q")]
    assert both == [text.replace("[a + b, a - b, b - a]", "(0)"), text.replace("a + b", "(0)")]
    with pytest.raises(UserError, match="0 times"):
        changed("def f(a):\n    return a + a\n", Change("f", "p + q", "0"))
    for old in ("[p + q, q - p, p - q]", "[p + q, p - q, p - q]", "p - q"):
        with pytest.raises(UserError, match=r"0 times|2 times"):
            changed(text, Change("f", old, "0"))


def test_a_new_text_takes_no_name_of_the_code() -> None:
    text = "def f(total, rows):\n    return total(rows)\n"
    assert "[total(row) for row in rows]" in changed(
        text, Change("f", "g(rows)", "[g(row) for row in rows]")
    )
    with pytest.raises(UserError, match="binds a name that the code has"):
        changed(text, Change("f", "g(rows)", "[g(total) for total in rows]"))


def test_numbers_have_their_types() -> None:
    text = "def f():\n    return [1, 1.0, True, -1]\n"
    for old, found in (("1.0", "[1, (0), True, -1]"), ("True", "[1, 1.0, (0), -1]")):
        assert found in changed(text, Change("f", old, "0"))


def test_letters_outside_ascii_and_decorators_move_no_place() -> None:
    text = "class A:\n    @property\n    def f(self):\n        return 'é', self.size, 'ü'\n"
    found = changed(text, Change("A.f", "self.size", "0"))
    assert found == text.replace("self.size", "(0)")
    assert changed(
        text, Change("A", "@property\ndef f(self):\n    return 'é', self.size, 'ü'", "")
    ) == ("class A:\n    pass\n")


def test_local_names_are_those_of_python() -> None:
    """Compares with what Python's own compiler says, in all files that have mutations."""
    for file in sorted({row.file for row in mutations() if row.file.endswith(".py")}):
        text = (ROOT / file).read_text()
        found: dict[tuple[str, int], set[str]] = {}
        for scope, name in Names(ast.parse(text)).owned.values():
            while isinstance(scope.node, COMPREHENSION):
                scope = scope.parent
            if isinstance(scope.node, FUNCTION):
                found.setdefault((scope.node.name, scope.node.lineno), set()).add(name)
        assert found == {key: names for key, names in python_locals(text, file) if names}


def python_locals(text: str, file: str) -> Iterator[tuple[tuple[str, int], set[str]]]:
    """The locals of each function in a text, including those of its comprehensions."""
    waiting = [symtable.symtable(text, file, "exec")]
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        if table.get_type() == "function" and table.get_name() not in (*COMPREHENSIONS, "lambda"):
            own, names = [table], set()
            while own:
                each = own.pop()
                own += [
                    child for child in each.get_children() if child.get_name() in COMPREHENSIONS
                ]
                symbols = [symbol for symbol in each.get_symbols() if symbol.is_local()]
                names |= {symbol.get_name() for symbol in symbols if not symbol.is_imported()}
            yield (table.get_name(), table.get_lineno()), {n for n in names if n.isidentifier()}
