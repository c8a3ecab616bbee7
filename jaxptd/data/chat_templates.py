"""Chat templates: where a run's template comes from, and the texts that it makes of chats.

A template is the tokenizer folder's own, or the file `data.chat_template`. It is rendered as by
transformers' `apply_chat_template`, so that training sees the texts that serving will.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxptd import stores
from jaxptd.data import tokenizer_folders
from jaxptd.data.tokenizer_folders import DEFAULT, NAMED
from jaxptd.data.tokenizers import BYTES, on_disk
from jaxptd.errors import UserError, install, quoted, read_small
from jaxptd.stores import StorePath, place, size_of

if TYPE_CHECKING:
    from jaxptd.config import DataConfig
    from jaxptd.data.jinja import Template

TOOL_USE = "tool_use"  # the name of a template for chats with tools
END = "eos_token"

Message = dict[str, Any]
Spans = list[tuple[int, int]]  # the first character of each, and the one after its last


class ChatTemplate:
    """Writes chats as text.

    Args:
        templates: by name; `default`, and maybe `tool_use`.
        tokens: spellings of special tokens by name, such as bos_token.
        date: the day that a template is told, if it asks for today's.
    """

    def __init__(
        self, templates: Mapping[str, "Template"], tokens: Mapping[str, str], date: str | None
    ) -> None:
        self._templates, self.tokens, self._date = templates, tokens, date

    @property
    def lacks(self) -> list[str]:
        """The names of special tokens that the template reads and the tokenizer does not have."""
        read = {name for template in self._templates.values() for name in template.reads}
        return [name for name in NAMED if name in read and name not in self.tokens]

    def marks(self, tools: Sequence[Any] | None) -> bool:
        """True if the template says, by `{% generation %}`, what a model should learn."""
        return self._chosen(tools).marks

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        answer: bool = False,
        marked: bool = False,
    ) -> str:
        """The text of a chat.

        Args:
            messages: as transformers takes them: dicts with role, and content or tool_calls.
            tools: JSON schemas of functions that the assistant may call.
            answer: end with what comes before an answer of the assistant (`add_generation_prompt`).
            marked: mark what `{% generation %}` encloses, see `jinja.OPEN`.

        Raises:
            UserError: the template refuses the chat.
        """
        variables = {**self.tokens, "messages": list(messages), "tools": tools, "documents": None}
        return self._chosen(tools).render(
            variables | {"add_generation_prompt": answer}, date=self._date, marked=marked
        )

    def _chosen(self, tools: Sequence[Any] | None) -> "Template":
        name = TOOL_USE if tools is not None and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            raise UserError(
                f"data.tokenizer has the chat templates {', '.join(map(quoted, self._templates))} "
                f"and none is named {DEFAULT}; name a file with data.chat_template"
            )
        return self._templates[name]


def load_chat_template(config: "DataConfig") -> ChatTemplate:
    """Reads the chat template of a run.

    Raises:
        UserError: there is none, it is broken, or Jinja2 is missing.
    """
    folder = None if config.tokenizer == BYTES else str(on_disk(config.tokenizer))
    folder = folder if folder and os.path.isdir(folder) else None
    if config.chat_template is not None:
        name = f"data.chat_template={quoted(config.chat_template)}"
        where = place(config.chat_template, field="data.chat_template")
        remedy = "name a Jinja file, or use null for the template of data.tokenizer's folder"
        if isinstance(where, StorePath) and size_of(where) is None:
            raise UserError(f"{name}: there is no such object; {remedy}")
        text = read_small(stores.on_disk(where), remedy=remedy, what="data.chat_template")
        sources = {DEFAULT: (text, name)}
    else:
        sources = tokenizer_folders.chat_templates(folder) if folder else {}
    if not sources:
        has = "is not a folder, which could have one" if folder is None else "has none"
        raise UserError(
            f"chats need a chat template, and data.tokenizer={quoted(config.tokenizer)} {has}; "
            "name a Jinja file with data.chat_template"
        )
    try:
        from jaxptd.data.jinja import Template
    except ImportError as error:
        raise UserError(f"a chat template needs Jinja2; {install('hf')}") from error
    templates = {name: Template(text, where) for name, (text, where) in sources.items()}
    settings = tokenizer_folders.settings(folder) if folder else {}
    return ChatTemplate(templates, tokenizer_folders.spelled_tokens(settings), config.chat_date)


# ---- what a model learns to write ----------------------------------------------------------------


def marked_spans(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None
) -> tuple[str, Spans]:
    """The text of a chat, and the parts that `{% generation %}` encloses.

    Raises:
        UserError: as `ChatTemplate.render`, or the template changes what it encloses.
    """
    from jaxptd.data.jinja import CLOSE, OPEN

    text = template.render(messages, tools)
    pieces = template.render(messages, tools, marked=True).split(OPEN)
    spans, end = [], len(pieces[0])
    for piece in pieces[1:]:
        inside, *after = piece.split(CLOSE)
        spans.append((end, end + len(inside)))
        end += len(piece) - len(after)
        if len(after) != 1:
            raise UserError("the chat template has {% generation %} within another; take one out")
    if "".join(pieces).replace(CLOSE, "") != text:
        raise UserError(
            "the chat template changes the text around {% generation %} afterwards; write these "
            "tags where the text is written out"
        )
    return text, spans


def turn_spans(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    *,
    turns: Sequence[int],
) -> tuple[str, Spans]:
    """The text of a chat, and the parts that some of its messages add to what comes before them.

    What comes before is the text of the earlier messages, ending with what precedes an answer.

    Args:
        template: of the run.
        messages: of the chat.
        tools: of the chat.
        turns: numbers of messages of the assistant.

    Raises:
        UserError: as `ChatTemplate.render`, or the text of a message depends on later ones.
    """
    text, spans = template.render(messages, tools), []
    for turn in turns:
        before = template.render(messages[:turn], tools, answer=True)
        until = template.render(messages[: turn + 1], tools)
        if not text.startswith(until):  # some templates write one end at the end of the whole text
            until = until.removesuffix(template.tokens.get(END, ""))
        if not (text.startswith(until) and until.startswith(before)):
            raise UserError(
                f"the chat template writes message {turn + 1} or what comes before it differently "
                "once more follows, so nothing marks what the assistant says; use data.train_on="
                "last or all, or a data.chat_template with {% generation %} around it"
            )
        spans.append((len(before), len(until)))
    return text, spans
