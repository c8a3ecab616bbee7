"""Tells local names of functions from all other names.

A local name belongs to the function, lambda or comprehension that binds it. Names of modules,
classes and imports, wherever they are, and built-in names belong to none.
"""

import ast
from collections.abc import Iterator

# By kind of node, the attribute that holds a name that some scope binds or reads.
IDENTIFIER: dict[type, str] = {
    ast.Name: "id",
    ast.arg: "arg",
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
    ast.ExceptHandler: "name",
    ast.MatchAs: "name",
    ast.MatchStar: "name",
    ast.MatchMapping: "rest",
}
IGNORED = ("kind", "type_comment")  # fields without meaning
COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITION = (*FUNCTION, ast.ClassDef)


def name_of(node: ast.AST) -> str | None:
    """The name that a node binds or reads, if any."""
    return getattr(node, IDENTIFIER.get(type(node), ""), None)


class Scope:
    """A module, class, function, lambda or comprehension.

    Args:
        node: the node that opens the scope.
        parent: the enclosing scope.
    """

    def __init__(self, node: ast.AST, parent: "Scope | None" = None) -> None:
        self.node, self.parent = node, parent
        self.bound: set[str] = set()
        self.parameters: set[str] = set()
        self.outer: set[str] = set()  # declared global or nonlocal
        self.literal: set[str] = set()  # declared global, or imported

    def owner(self, name: str) -> "Scope | None":
        """The scope of the function that binds a name read here; None: the name is not local."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.literal:
                return None
            hidden = scope is not self and isinstance(scope.node, ast.ClassDef)
            if name in scope.bound - scope.outer and not hidden:
                return None if isinstance(scope.node, ast.ClassDef | ast.Module) else scope
            scope = scope.parent
        return None


Key = tuple[
    Scope | None, str
]  # a name and the scope that owns it; None: a pattern's own name, or not local


class Names:
    """The names of a tree and the scopes that contain them.

    Args:
        tree: a module, or one made of the expression or the statements of a pattern.
    """

    def __init__(self, tree: ast.AST) -> None:
        self.root = Scope(tree)
        self.scopes: dict[ast.AST, Scope] = {}  # that contain each node
        self._visit(tree, self.root)
        self.owned: dict[ast.AST, Key] = {}  # the local ones
        for node, scope in self.scopes.items():
            name = name_of(node)
            if name and (owner := scope.owner(name)):
                self.owned[node] = owner, name

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        self.scopes[node] = scope
        if name := name_of(node):
            if not isinstance(getattr(node, "ctx", None), ast.Load):
                scope.bound.add(name)
            if isinstance(node, ast.arg):
                scope.parameters.add(name)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            scope.outer.update(node.names)
            scope.literal.update(node.names if isinstance(node, ast.Global) else ())
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [(each.asname or each.name).partition(".")[0] for each in node.names]
            scope.bound.update(names)
            scope.literal.update(names)
        for child, inner in _children(node, scope):
            self._visit(child, inner)


def _children(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
    """The nodes inside a node, each with its scope."""
    inside, outside = [], [*ast.iter_child_nodes(node)]
    if isinstance(node, COMPREHENSION):
        first = node.generators[0]
        inside = [each for each in outside if each is not first] + [first.target, *first.ifs]
        outside = [first.iter]
    elif isinstance(node, (*FUNCTION, ast.Lambda)):
        arguments = [*ast.iter_child_nodes(node.args)]
        inside = [each for each in arguments if isinstance(each, ast.arg)]
        inside += node.body if isinstance(node.body, list) else [node.body]
        outside = [each for each in (*outside, *arguments) if each not in inside]
        outside.remove(node.args)
    elif isinstance(node, ast.ClassDef):
        inside, outside = node.body, [each for each in outside if each not in node.body]
    elif isinstance(node, ast.NamedExpr):  # belongs to the function around a comprehension
        outer = scope
        while isinstance(outer.node, COMPREHENSION) and outer.parent:
            outer = outer.parent
        yield node.target, outer
        outside = [node.value]
    inner = Scope(node, scope) if inside else scope
    yield from ((each, inner) for each in inside)
    yield from ((each, scope) for each in outside)


def canonical(tree: ast.AST, names: Names) -> str:
    """The syntax of a tree as text that does not depend on layout, local names or docstrings.

    All versions of Python give the same text.
    """
    numbers: dict[Key, int] = {}

    def words(node: object) -> str:
        if isinstance(node, list):
            return f"[{', '.join(map(words, node))}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        fields = {each: getattr(node, each, None) for each in node._fields}
        if node in names.owned:
            fields[IDENTIFIER[type(node)]] = numbers.setdefault(names.owned[node], len(numbers))
        if isinstance(node, ast.JoinedStr):  # Python 3.12 ends a format with an empty one
            fields["values"] = [each for each in node.values if getattr(each, "value", None) != ""]
        if isinstance(node, FUNCTION) and ast.get_docstring(node, clean=False) is not None:
            fields["body"] = node.body[1:]
        kept = {key: value for key, value in fields.items() if value is not None and value != []}
        said = [f"{key}={words(value)}" for key, value in kept.items() if key not in IGNORED]
        return f"{type(node).__name__}({', '.join(said)})"

    return words(tree)
