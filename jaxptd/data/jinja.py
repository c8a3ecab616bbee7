"""Renders chat templates: Jinja in a sandbox, with the names that transformers gives a template.

A template comes with a model, so it is not trusted: it reaches nothing but what it is given, and
the steps that it may take are counted. It is also a function of its inputs alone: there is no
random filter, and the day that it may ask for is given to it.

Needs Jinja2, the `hf` extra. Source of the names: `utils/chat_template_utils.py` of
transformers 5.24.
"""

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from jaxptd.errors import UserError, quoted

STEPS = 10**6  # turns of loops and calls in one text
LARGEST = 10**7  # characters of a repeated text, or bits of a power
# Half surrogate pairs, which no text has: they mark what `{% generation %}` encloses.
OPEN, CLOSE = "\ud800", "\ud801"
SHOWN = 160  # most characters of a template's error in a message


class Template:
    """A chat template.

    Args:
        source: its text. Its variables are then in `reads`.
        name: in messages, such as the path of its file.

    Raises:
        UserError: it is not Jinja.
    """

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        self._sandbox = _Sandbox()
        try:
            self._compiled = self._sandbox.from_string(source)
            self.reads = frozenset(meta.find_undeclared_variables(self._sandbox.parse(source)))
        except TemplateSyntaxError as error:
            raise UserError(f"{name} is not Jinja: line {error.lineno}: {_said(error)}") from error
        except Exception as error:  # nested too deeply, or a constant that cannot be computed
            raise UserError(f"{name} cannot be read as Jinja: {_said(error)}") from error

    @property
    def marks(self) -> bool:
        """True if the template says, by `{% generation %}`, what a model should learn."""
        return self._sandbox.marks

    def render(
        self, variables: Mapping[str, Any], *, date: str | None = None, marked: bool = False
    ) -> str:
        """The text of a chat.

        Args:
            variables: what the template reads.
            date: the day that it is told, if it asks for today's.
            marked: put OPEN and CLOSE around what `{% generation %}` encloses.

        Raises:
            UserError: the template raises an error, asks for a day that was not given, or takes too
                many steps.
        """
        self._sandbox.left, self._sandbox.date, self._sandbox.marking = STEPS, date, marked
        try:
            return self._compiled.render(variables)
        except UserError:
            raise
        except RecursionError as error:
            raise UserError(f"{self.name} calls itself too often; repair it") from error
        except Exception as error:  # whatever a template's expressions raise
            raise UserError(f"{self.name} refuses this chat: {_said(error)}") from error


def _said(error: Exception) -> str:
    message = " ".join(str(error).split())
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return quoted(kind + (message or type(error).__name__), SHOWN)


class _Counting(CodeGenerator):
    """Compiles templates so that the turns of their loops are counted."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:  # noqa: N802
        for loop in node.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
            loop.iter.set_environment(self.environment)
        super().visit_Template(node, frame)


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, around what a model should learn to write."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        self.environment.marks = True  # type: ignore[attr-defined]
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        marking = self.environment.marking  # type: ignore[attr-defined]
        return f"{OPEN}{caller()}{CLOSE}" if marking else caller()


class _Names(Namespace):
    """A namespace without the names by which Python's objects lead to its interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no name {name!r}")


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. left: steps that it may still take."""

    code_generator_class = _Counting
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.left, self.marks, self.marking = STEPS, False, False
        self.date: str | None = None
        self.filters |= {"tojson": _tojson, "_counted": _counted}
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": self._strftime,
            "namespace": _Names,
        }
        del self.filters["random"], self.globals["lipsum"]

    def step(self, count: int = 1) -> None:
        self.left -= count
        if self.left < 0:
            raise SecurityError(f"it takes more than {STEPS} steps, so it may never end; repair it")

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.step()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.step()
        if operator == "*":
            sizes = [len(x) if isinstance(x, Sized) else abs(x) for x in (left, right)]
            large = any(isinstance(x, Sized) for x in (left, right)) and sizes[0] * sizes[1]
        else:
            large = left and abs(left) > 1 and abs(right) * max(int(abs(left)).bit_length(), 1)
        if large > LARGEST:
            raise SecurityError(f"the result of {operator} would be too large; repair it")
        return super().call_binop(context, operator, left, right)

    def _strftime(self, form: str) -> str:
        if self.date is None:
            today = datetime.date.today().isoformat()
            raise UserError(
                "the chat template writes today's date into each text, so a run that resumes "
                f"tomorrow would read other data; fix the day with data.chat_date={today}"
            )
        return datetime.datetime.fromisoformat(self.date).strftime(form)


@pass_context
def _counted(context: Any, items: Iterable[Any]) -> Iterable[Any]:
    """The items of a loop, whose turns are counted."""
    if isinstance(items, Sized):
        context.environment.step(len(items))
        return items
    return _each(context.environment, items)


def _each(sandbox: _Sandbox, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        sandbox.step()
        yield item


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)
