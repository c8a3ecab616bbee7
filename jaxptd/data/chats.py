"""Reads chats from records and tokenizes them: the ids, and which of them a model learns.

- `messages`: a list of objects with `role`, and `content` (a text or a list of text parts) or
  `tool_calls`; further keys go to the template. The usual form.
- `sharegpt`: a list of objects with `from` (human, gpt or another role) and `value`.
- `alpaca`: the record's own `instruction`, `input` (maybe empty) and `output`.

The ids are those of transformers' `apply_chat_template`: special tokens in the text are read as
tokens, and nothing is added to what the template writes, neither at the beginning nor at the end.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jaxptd.data.chat_templates import (
    Message,
    Spans,
    load_chat_template,
    marked_spans,
    turn_spans,
)
from jaxptd.data.lengths import Piece
from jaxptd.data.pairs import joined
from jaxptd.data.records import explained, has_records, read_values
from jaxptd.data.tokenizers import Tokenizer, spellings
from jaxptd.errors import UserError, quoted
from jaxptd.stores import Place

if TYPE_CHECKING:
    from jaxptd.config import DataConfig

T = TypeVar("T")
MESSAGES, SHAREGPT, ALPACA = "messages", "sharegpt", "alpaca"
FIELDS = {MESSAGES: "messages", SHAREGPT: "conversations"}  # their usual names
OF_ALPACA = ("instruction", "output")
SPEAKERS = {"human": "user", "gpt": "assistant"}  # of ShareGPT -> roles
REASONING = ("reasoning_content", "thinking", "reasoning")
ASSISTANT = "assistant"
LONGEST = 2**25  # characters of a chat: far beyond any context length
_KINDS = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a text"}
_KINDS |= {"int": "a number", "float": "a number", "bool": "true or false"}


class Chats:
    """Reads the chats of files.

    Args:
        config: names their form, their template, and what is learned.
        tokenizer: of the texts.
        spelled: counts the special tokens that messages spell.

    Raises:
        UserError: there is no template, or it is broken.
    """

    def __init__(
        self, config: "DataConfig", tokenizer: Tokenizer, spelled: Counter[str] | None = None
    ) -> None:
        self.template = load_chat_template(config)
        self.remarks: list[str] = []
        if tokenizer.special and tokenizer.special_tokens == "text":
            raise UserError(
                "the chat template's special tokens must be read as tokens, and data.special_tokens"
                f"={config.special_tokens} reads them as plain text; use parse"
            )
        if lacks := self.template.lacks:
            self.remarks.append(
                f"warning: the chat template reads {' and '.join(lacks)}, which data.tokenizer "
                "does not name; it writes nothing for them"
            )
        self._config, self._tokenizer, self._spelled = config, tokenizer, spelled
        self._pattern = spellings(tokenizer)
        self._form: str | None = None if config.format == "auto" else config.format

    def read(self, files: Iterable[Place]) -> Iterator[Piece]:
        """Yields the ids of each chat, and which of them count in the loss; or of each pair.

        Raises:
            UserError: a file or a record cannot be read, a chat has nothing to write, or the
                template refuses it; names the file and the record.
        """
        for path in files:
            empty = True
            with explained(path):
                for where, record in self._records(path):
                    empty = False
                    with _at(where):
                        if self._config.rejected_field is not None:
                            piece = self._pair(record)
                        else:
                            piece = Piece(*self._tokenize(*self._chat(record)))
                    yield piece
            if empty:
                raise UserError(f"data.source: {path} holds no chats; leave it out")

    # ---- answers --------------------------------------------------------------------------------

    def asked(self, record: Mapping[str, Any]) -> list[int]:
        """The ids of a record's chat, with what the template writes before an answer.

        Raises:
            UserError: it is not a chat, the last message is an answer, or the template refuses it.
        """
        field = self.field or OF_ALPACA[0]
        if field not in record:
            raise UserError(f"it has no {field}, which holds the chat; use an object with {field}")
        given = {"messages": record[field]} if self.field else {**record, "output": ""}
        messages, tools = self._chat(given | {"tools": record.get(self._config.tools_field or "")})
        if messages[-1]["role"] == ASSISTANT or (not self.field and record.get("output")):
            raise UserError("the chat has its answer already; leave the answer out")
        render = partial(self.template.render, tools=tools, answer=True)
        return self._tokenizer.encode(_with_texts(render, messages)).tolist()

    def answered(self, record: Mapping[str, Any], text: str) -> dict[str, Any]:
        """The record with the assistant's answer."""
        if not self.field:
            return {**record, OF_ALPACA[1]: text}
        message = {"role": ASSISTANT, "content": text}
        if self._form == SHAREGPT:
            message = {"from": "gpt", "value": text}
        return {**record, self.field: [*record[self.field], message]}

    def turn_end(self) -> tuple[tuple[int, ...], list[str]]:
        """The special token that the template writes behind an answer, and the text before it.

        Either may be missing.
        """
        asked = {"role": "user", "content": "Question"}
        text = self.template.render([asked, {"role": ASSISTANT, "content": "Answer"}])
        behind = text.rpartition("Answer")[2]
        found = self._pattern and self._pattern.search(behind)
        before = (behind[: found.start()] if found else behind).strip()
        ends = (self._tokenizer.special[found.group()],) if found else ()
        return ends, [before] if before else []

    # ---- records of files -----------------------------------------------------------------------

    @property
    def field(self) -> str:
        """The field of messages; empty for Alpaca's records, which have fields of their own."""
        return self._config.messages_field or FIELDS.get(self._config.format, "")

    def _records(self, path: Place) -> Iterator[tuple[str, Mapping[str, Any]]]:
        config, field = self._config, self.field
        fields, optional = ((field,), ()) if field else (OF_ALPACA, ("input",))
        if not has_records(path):
            raise UserError(
                f"data.source: {path} has no fields, so it holds no chats; write them as .jsonl or "
                ".parquet"
            )
        remedy = "name the field of chats with data.messages_field"
        if not field:
            remedy = "data.format=alpaca reads instruction, input and output"
        others = (*optional, *([config.tools_field] if config.tools_field else []))
        names = {"prompt": config.prompt_field, "rejected": config.rejected_field}
        of_pairs = {key: name for key, name in names.items() if name is not None}
        every = (*fields, *of_pairs.values())
        for where, record in read_values(path, every, others, remedy=remedy):
            named = {"messages": record[field]} if field else record
            more = {key: record[name] for key, name in of_pairs.items()}
            yield where, {**named, **more, "tools": record.get(config.tools_field or "")}

    # ---- the messages of a record ---------------------------------------------------------------

    def _chat(self, record: Mapping[str, Any]) -> tuple[list[Message], list[Any] | None]:
        """The messages of a record and its tools, checked, as transformers' templates read them."""
        size = _size(record, self._count)
        if size > LONGEST:
            raise UserError(f"it has {size:,} characters; a chat has at most {LONGEST:,}")
        if self._form == ALPACA:
            given = _of_alpaca(record)
        else:
            given = record["messages"]
            if not isinstance(given, list) or not given:
                kind = "an empty list" if given == [] else _kind(given)
                raise UserError(f"its chat is {kind}; it must be a list of messages")
            for number, each in enumerate(given, start=1):
                if not isinstance(each, dict):
                    raise UserError(f"message {number} is {_kind(each)}; it must be an object")
            self._form = self._form or self._recognized(given[0])
        make = _of_sharegpt if self._form == SHAREGPT else dict
        messages = [_message(make(each), number) for number, each in enumerate(given, start=1)]
        return messages, _tools(record.get("tools"), self._config.tools_field)

    def _recognized(self, message: Mapping[str, Any]) -> str:
        """The form of a source's chats, by its first message."""
        for form, keys, says in (
            (MESSAGES, ("role",), "messages with role and content"),
            (
                SHAREGPT,
                ("from", "value"),
                "ShareGPT's from and value; human is user, gpt assistant",
            ),
        ):
            if all(key in message for key in keys):
                field = json.dumps(self._config.messages_field)
                self.remarks.append(f"chats in {field} have the form {form} ({says})")
                return form
        raise UserError(
            f"message 1 has {', '.join(map(quoted, message)) or 'nothing'}; a message has role and "
            "content, or from and value"
        )

    def _count(self, text: str) -> None:
        if self._pattern is not None and self._spelled is not None:
            self._spelled.update(self._pattern.findall(text))

    # ---- pairs ----------------------------------------------------------------------------------

    def _pair(self, record: Mapping[str, Any]) -> Piece:
        """The ids of two chats, and of what follows the messages that they have in common.

        The targets are those of TRL's trainer: all that the template writes behind what precedes
        an answer.
        """
        before = record.get("prompt", [])
        if not isinstance(before, list):
            raise UserError(
                f"its prompt is {_kind(before)}; beside chats it must be a list of messages, so "
                "leave data.prompt_field out"
            )
        both = []
        for name in ("messages", "rejected"):
            given = record[name]
            if not isinstance(given, list) or not given:
                kind = "an empty list" if given == [] else _kind(given)
                raise UserError(f"a chat of the pair is {kind}; it must be a list of messages")
            both.append(self._chat({**record, "messages": [*before, *given]}))
        (chosen, tools), (rejected, _) = both
        alike = [a == b for a, b in zip(chosen, rejected, strict=False)]
        shared = [*alike, False].index(False)
        shared = len(before) or min(shared, len(alike) - 1)
        if not shared:
            raise UserError("its two chats begin with different messages; they need one prompt")
        write = partial(self._answer, tools=tools, first=shared)
        texts = [_with_texts(write, messages) for messages in (chosen, rejected)]
        found = [(self._tokenizer.encode_places(text), spans) for text, spans in texts]
        return Piece(*joined(*((ids, learned(places, spans)) for (ids, places), spans in found)))

    def _answer(
        self, messages: list[Message], tools: list[Any] | None, first: int
    ) -> tuple[str, Spans]:
        """The text of a chat, and what follows its prompt; first: the message behind that."""
        text = self.template.render(messages, tools)
        before = self.template.render(messages[:first], tools, answer=True)
        if not text.startswith(before):
            raise UserError(
                "the chat template writes the prompt differently once an answer follows, so "
                "nothing marks where the answer begins; use another data.chat_template"
            )
        return text, [(len(before), len(text))]

    # ---- their tokens ---------------------------------------------------------------------------

    def _tokenize(
        self, messages: list[Message], tools: list[Any] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        text, spans = _with_texts(partial(self._written, tools=tools), messages)
        if self._form == ALPACA and len(messages) == 1:  # it has no answer
            spans = []
        if spans is None:
            ids = self._tokenizer.encode(text)
            return ids, np.ones(len(ids), bool)
        ids, places = self._tokenizer.encode_places(text)
        return ids, learned(places, spans)

    def _written(
        self, messages: list[Message], tools: list[Any] | None
    ) -> tuple[str, Spans | None]:
        """The text of a chat, and what is learned of it; None for all."""
        train_on, template = self._config.train_on, self.template
        if train_on == "all":
            return template.render(messages, tools), None
        if template.marks(tools):
            text, spans = marked_spans(template, messages, tools)
            return text, spans if train_on == "assistant" else spans[-1:]
        turns = [n for n, each in enumerate(messages) if each["role"] == ASSISTANT]
        turns = turns if train_on == "assistant" else turns[-1:]
        return turn_spans(template, messages, tools, turns=turns)


def learned(place_T2: np.ndarray, spans: Spans) -> np.ndarray:
    """Which tokens have a character of these parts of the text, bool[T].

    Args:
        place_T2: the first character of each token, and the one after its last; both the same for
            a token whose spaces a tokenizer leaves out, which then ends there.
        spans: the same of each part.
    """
    end_T = place_T2[:, 1]
    begin_T = np.minimum(place_T2[:, 0], end_T - 1)
    found = np.zeros(len(place_T2), bool)
    for begin, end in spans:
        found |= (end_T > begin) & (begin_T < end)
    return found


@contextlib.contextmanager
def _at(where: str) -> Iterator[None]:
    """Adds the place of a record to errors about it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data.source: {where}: {error}") from error


# ---- forms of records ----------------------------------------------------------------------------


class Parts(list[dict[str, str]]):
    """The text parts of a message, which a template can loop over and cannot print by mistake."""

    def __str__(self) -> str:
        raise TypeError("the template takes texts, not lists of text parts")

    __repr__ = __format__ = __str__  # type: ignore[assignment]


def _of_sharegpt(message: Mapping[str, Any]) -> Message:
    if missing := [key for key in ("from", "value") if key not in message]:
        raise UserError(f"a message has no {missing[0]}; ShareGPT's have from and value")
    speaker = message["from"]
    role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**others, "role": role, "content": message["value"]}


def _of_alpaca(record: Mapping[str, Any]) -> list[Message]:
    texts = [record["instruction"], record.get("input") or "", record["output"]]
    for name, text in zip(("instruction", "input", "output"), texts, strict=True):
        if not isinstance(text, str):
            raise UserError(f"its {name} is {_kind(text)}; it must be a text")
    asked = "\n\n".join(text for text in texts[:2] if text)
    answer = {"role": ASSISTANT, "content": texts[2]}
    return [{"role": "user", "content": asked}, *([answer] if texts[2] else [])]


def _message(given: Mapping[str, Any], number: int) -> Message:
    """A message as transformers gives it to a template, without what is null.

    Source: transformers 5.24, `_normalize_chat_messages` and `_alias_reasoning_fields`.
    """
    message = {key: value for key, value in given.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise UserError(f"message {number} has no role, a text such as user or assistant")
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all_objects(calls)):
        raise UserError(f"message {number}: tool_calls must be a list of objects")
    if content is None and not calls:
        null = " is null" if "content" in given else ""
        raise UserError(f"message {number} has no content{null and f': it{null}'}; give it a text")
    if isinstance(content, list):
        message["content"] = Parts(_part(each, number) for each in content)
    elif content is not None and not isinstance(content, str):
        raise UserError(
            f"message {number}: content is {_kind(content)}; use a text or a list of text parts"
        )
    reasoning = next((message[key] for key in REASONING if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _part(part: Any, number: int) -> dict[str, str]:
    part = {"type": "text", "text": part} if isinstance(part, str) else part
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        kind = quoted(part.get("type", "?")) if isinstance(part, dict) else _kind(part)
        raise UserError(f"message {number} has a part that is no text ({kind}); leave it out")
    return {key: value for key, value in part.items() if value is not None}


def _with_texts(write: Callable[[list[Message]], T], messages: list[Message]) -> T:
    """Writes messages; as texts alone if the template takes no parts of one."""
    try:
        return write(messages)
    except UserError:
        if not any(isinstance(each.get("content"), Parts) for each in messages):
            raise
        return write([_joined(each) for each in messages])


def _joined(message: Message) -> Message:
    """The message with one text in place of its parts."""
    content = message.get("content")
    if not isinstance(content, Parts):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _tools(given: Any, field: str | None) -> list[Any] | None:
    """The tools of a record, which may be written as JSON in a text; None without any."""
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else None
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"its {field} is a text that is not JSON ({error}); data.tools_field=null does "
                "not read it"
            ) from error
    if given is None:
        return None
    if not isinstance(given, list) or not all_objects(given):
        raise UserError(
            f"its {field} is not a list of objects, the JSON schemas of tools; data.tools_field="
            "null does not read it"
        )
    return given


def all_objects(values: list[Any]) -> bool:
    """True for a list of JSON objects."""
    return all(isinstance(each, dict) for each in values)


def _size(value: Any, count: Callable[[str], None]) -> int:
    """The characters of all texts in a value. Raises UserError for half a surrogate pair."""
    waiting, size = [value], 0
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            try:
                each.encode()
            except UnicodeEncodeError as error:
                half = each[error.start]
                raise UserError(f"{half!a} is half a surrogate pair; remove it") from error
            count(each)
            size += len(each)
        elif isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, list):
            waiting += each
    return size


def _kind(value: object) -> str:
    name = type(value).__name__
    return _KINDS.get(name, name)
