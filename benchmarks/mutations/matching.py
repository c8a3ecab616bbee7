"""Finds the place in code that a pattern describes, and changes it there.

A pattern is Python: an expression or statements. White space, line breaks, quotes, parentheses and
comments are ignored. A name that the file defines at its top level, or that is built in, stands for
itself. Any other name stands for one local name of the code, whatever it is called there, and
different names stand for different locals. If the code's name is not local, such as a class's
field, the name stands for itself.
"""

import ast
import builtins
import contextlib
import itertools
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from benchmarks.mutations.names import (
    DEFINITION,
    FUNCTION,
    IDENTIFIER,
    IGNORED,
    Key,
    Names,
    canonical,
    name_of,
)
from jaxptd.errors import UserError

Bound = dict[Key, Key]  # a pattern's name -> the code's


class Change(NamedTuple):
    """A place in a file, and what replaces the code there.

    where: the qualified name of a function or class. A class means its own statements without what
        it defines, and so does the module, whose name is empty.
    old: the pattern of the place.
    new: what replaces it; if empty, statements are removed.
    given: a pattern of another place in the definition, for names in `new` that `old` lacks.
    """

    where: str
    old: str
    new: str
    given: str = ""


class Place(NamedTuple):
    """The nodes that a pattern describes, and its names in the code."""

    nodes: list[ast.AST]
    bound: Bound


class Code:
    """The syntax of a file.

    Args:
        text: the text of the file.
    """

    def __init__(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self.names = names = Names(self.tree)
        built_in = {*dir(builtins)} - {"_"}  # which a doctest binds there
        self.owned, self.literal = names.owned, built_in | {*names.root.bound}
        self.definitions: dict[str, list[ast.AST]] = {"": [self.tree]}
        self._define(self.tree, "")

    def _define(self, node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, DEFINITION):
                name = f"{prefix}.{child.name}".removeprefix(".")
                self.definitions.setdefault(name, []).append(child)
            self._define(child, name)

    def place(self, change: Change) -> Place:
        """Finds the place of a change.

        Raises:
            UserError: there is no such definition, or not exactly one such place in it.
        """
        where = change.where or "the module's top level"
        if change.where not in self.definitions:
            raise UserError(f"nothing is named {where}")
        found = self._places(change)
        if len(found) != 1:
            raise UserError(f"{where} has {change.old!r} {len(found)} times, not once")
        return found[0]

    def parts(self, where: str) -> list[str]:
        """A function's syntax, or that of each statement of a class or module, without definitions.

        It does not depend on layout, names of locals or docstrings of functions.
        """
        roots = self.definitions[where]
        nodes = [
            node
            for root in roots
            for node in ([root] if isinstance(root, FUNCTION) else ast.iter_child_nodes(root))
            if node is root or not isinstance(node, DEFINITION)
        ]
        return [canonical(node, self.names) for node in nodes]

    def _places(self, change: Change) -> list[Place]:
        old, given = _Pattern(change.old, self, change.new), change.given
        found = {}
        for root in self.definitions[change.where]:
            seeds = [place.bound for place in _Pattern(given, self).places(root)] if given else [{}]
            for place in (place for seed in seeds for place in old.places(root, seed)):
                own = frozenset((key, name) for key, name in place.bound.items() if not key[0])
                found[place.nodes[0], own] = place
        return [*found.values()]


class _Pattern:
    """A pattern, or what replaces it.

    Args:
        text: an expression or statements.
        code: the file that resolves names.
        partner: what replaces the text, or what the text replaces; if either is not an expression,
            both are statements.
    """

    def __init__(self, text: str, code: Code, partner: str | None = None) -> None:
        self.code = code
        self.is_expression = all(map(_is_expression, (text, text if partner is None else partner)))
        self.tree = ast.parse(f"({text}\n)" if self.is_expression else textwrap.dedent(text))
        body = self.tree.body
        self.nodes: list[ast.AST] = [*body]
        if self.is_expression:
            self.nodes = [each.value for each in body if isinstance(each, ast.Expr)]
        names = Names(self.tree)
        self.owned, self.inner, self.binds = names.owned, {*names.owned}, names.root.bound
        for node in names.scopes:
            name = name_of(node)
            if name and node not in self.owned and name not in code.literal:
                self.owned[node] = None, name

    def places(self, root: ast.AST, bound: Bound | None = None) -> Iterator[Place]:
        """The places in a definition that agree with the names bound so far."""
        for nodes in _slices(root, len(self.nodes), self.is_expression):
            found = {**(bound or {})}
            if self._same(self.nodes, nodes, found):
                yield Place(nodes, found)

    def _same(self, pattern: object, code: object, bound: Bound) -> bool:
        if type(pattern) is not type(code):
            return False
        if isinstance(pattern, list) and isinstance(code, list):
            pairs = zip(pattern, code, strict=False)
            return len(pattern) == len(code) and all(self._same(a, b, bound) for a, b in pairs)
        if not isinstance(pattern, ast.AST):
            return pattern == code
        name = IDENTIFIER.get(type(pattern))
        if name and not self._same_name(pattern, code, bound):
            return False
        fields = [each for each in pattern._fields if each not in (name, *IGNORED)]
        return all(
            self._same(getattr(pattern, each), getattr(code, each), bound) for each in fields
        )

    def _same_name(self, pattern: ast.AST, code: ast.AST, bound: Bound) -> bool:
        mine = self.owned.get(pattern)
        theirs = self.code.owned.get(code, (None, name_of(code)))
        if theirs[0] is None and name_of(pattern) != name_of(code):
            return False
        if mine is None:
            return theirs[0] is None
        if mine not in bound and theirs not in bound.values():
            bound[mine] = theirs
        return bound.get(mine) == theirs

    def written(self, place: Place) -> str:
        """The text with the code's names at a place."""
        text, scope = ast.unparse(self.tree), self.code.names.scopes[place.nodes[0]]
        for node, key in self.owned.items():
            owner, name = place.bound.get(key, key)
            here = scope.owner(name)
            known = key[0] or name in self.binds or (here and name in here.parameters)
            if not (here is owner if key in place.bound else known):
                raise UserError(f"{text!r} has {key[1]}, which neither old nor given has there")
            setattr(node, IDENTIFIER[type(node)], name)
        if {*Names(self.tree).owned} != self.inner:
            raise UserError(f"{text!r} binds a name that the code has")
        return _source(self.nodes)


@lru_cache(maxsize=256)
def code_of(text: str) -> Code:
    """The syntax of a text; callers must not change it."""
    return Code(text)


def changed(text: str, change: Change) -> str:
    """Returns the text of a file after a change.

    Raises:
        UserError: the change has no place or several, changes nothing, or uses an unknown name.
    """
    code = code_of(text)
    place = code.place(change)
    new = _Pattern(change.new, code, change.old)
    written = new.written(place)
    if written == _source(place.nodes):
        raise UserError(f"{change.new!r} changes nothing")
    begin, end, column = _span(text, place.nodes)
    data, indented = text.encode(), textwrap.indent(written, " " * column).lstrip()
    for inserted in [indented] if written else ["", "pass"]:
        found = (data[:begin] + inserted.encode() + data[end:]).decode()
        with contextlib.suppress(SyntaxError):
            ast.parse(found)
            return found
    raise UserError(f"{change.new!r} cannot stand where {change.old!r} is")


def _source(nodes: list[ast.AST]) -> str:
    """The text of statements, or of an expression in parentheses."""
    text = "\n".join(map(ast.unparse, nodes))
    return f"({text})" if nodes and isinstance(nodes[0], ast.expr) else text


def _is_expression(text: str) -> bool:
    with contextlib.suppress(SyntaxError):
        return bool(text.strip() and ast.parse(f"({text}\n)", mode="eval"))
    return False


def _slices(root: ast.AST, size: int, is_expression: bool) -> Iterator[list[ast.AST]]:
    """The expressions of a definition, or all runs of this many consecutive statements."""
    for node in _nodes(root):
        if is_expression and isinstance(node, ast.expr):
            yield [node]
        for _, body in [] if is_expression else ast.iter_fields(node):
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield from (body[at : at + size] for at in range(len(body) - size + 1))


def _nodes(root: ast.AST) -> Iterator[ast.AST]:
    whole, waiting = isinstance(root, FUNCTION), [root]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.JoinedStr):  # where Python 3.11 gives wrong positions
            children = ast.iter_child_nodes(node)
            waiting += [each for each in children if whole or not isinstance(each, DEFINITION)]


def _span(text: str, nodes: list[Any]) -> tuple[int, int, int]:
    """The first byte of nodes, the first byte after them, and the first node's column."""
    starts = [0, *itertools.accumulate(map(len, text.encode().splitlines(keepends=True)))]
    first, last = nodes[0], nodes[-1]
    line = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", []))])
    begin, end = starts[line - 1] + first.col_offset, starts[last.end_lineno - 1]
    return begin, end + last.end_col_offset, first.col_offset
