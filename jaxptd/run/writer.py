"""Writes texts with a trained model: continues prompts, and answers chats."""

import dataclasses
import datetime
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Generator as Pieces
from functools import cached_property, partial
from typing import Any

from jaxptd.data.chats import MESSAGES, Chats
from jaxptd.data.tokenizers import (
    Tokenizer,
    continuation,
    pieces,
    spelling,
    until_stop,
    with_begin,
)
from jaxptd.errors import UserError, quoted
from jaxptd.models.families import family_of
from jaxptd.models.family import Writing
from jaxptd.params import Params
from jaxptd.run.generator import Generator
from jaxptd.run.sampling import Sampling
from jaxptd.run.speculative import Drafts
from jaxptd.step import Program


@dataclasses.dataclass(frozen=True)
class Writer:
    """Writes texts with a program's model; programs are compiled once for all of them.

    A text ends before the first end token or the first of the texts in `stop`. A model that
    continues its prompt starts a new document after an empty one. An encoder-decoder answers
    instead, and its prompt may name special tokens such as <extra_id_0>.

    Args:
        program: has the model.
        params: of the model.
        tokenizer: of the model.
        sampling: how tokens are drawn.
        stop: further texts before which a text ends.
        drafts: counts those of MTP modules. None: they make none.
        ends: further ids before which a text ends.
    """

    program: Program
    params: Params
    tokenizer: Tokenizer
    sampling: Sampling
    stop: Sequence[str] = ()
    drafts: Drafts | None = None
    ends: tuple[int, ...] = ()

    @cached_property
    def _writing(self) -> Writing:
        family = family_of(self.program.config.model)
        if family.writing is None:
            name = self.program.config.model.family
            raise UserError(
                f"model.family={name} does not write text; use a decoder such as gpt or llama"
            )
        return family.writing

    @cached_property
    def generator(self) -> Generator:
        """Generates the ids."""
        vocab_size = min(self.tokenizer.vocab_size, self.program.config.model.vocab_size or 0)
        ends = (*self.tokenizer.ends, *self.ends)
        return Generator(self.program, vocab_size, self.sampling, ends, self.drafts)

    def __call__(self, prompt: str, tokens: int) -> str:
        """The prompt and the text that the model adds; of an encoder-decoder the answer alone.

        Args:
            prompt: text that the model reads.
            tokens: to write at most.

        Raises:
            UserError: the model does not write text, its vocabulary lacks an id of the prompt, or
                the prompt is too long; or with drafts, the model has no MTP modules.
        """
        ids = self._ids(prompt)
        found = self.generator(self.params, ids, tokens)
        return self._begins(prompt) + until_stop(self._decoder(ids)(found), self.stop)

    def write_all(self, prompts: Sequence[str], tokens: int) -> Iterator[str]:
        """The texts of calls, in order; those that fit the model are written side by side.

        Raises:
            UserError: as a call, before the first text.
        """
        asked = [self._ids(prompt) for prompt in prompts]
        added = self.added(asked, [tokens] * len(asked))
        return (self._begins(prompt) + text for prompt, text in zip(prompts, added, strict=True))

    def added(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> Iterator[str]:
        """The texts that the model adds to prompts, in order; side by side those that fit.

        Args:
            prompts: their ids.
            tokens: to write after each at most.
        """
        longest, continues = self.program.config.model.seq_length, self._writing.continues
        together = [
            number
            for number, (prompt, count) in enumerate(zip(prompts, tokens, strict=True))
            if self.drafts is None and (len(prompt) + count <= longest or not continues)
        ]
        counts = [tokens[number] for number in together]
        texts = [prompts[number] for number in together]
        written = self.generator.generate_many(self.params, texts, counts)
        alone, found = set(range(len(prompts))) - set(together), dict[int, list[int]]()
        for number, prompt in enumerate(prompts):
            if number in alone:
                found[number] = self.generator(self.params, prompt, tokens[number])
            while number not in found:
                place, ids = next(written)
                found[together[place]] = ids
            yield until_stop(self._decoder(prompt)(found.pop(number)), self.stop)

    def stream(self, prompt: str, tokens: int, *, with_prompt: bool = True) -> Iterator[str]:
        """The text of a call in pieces: the prompt, and the rest as it is generated.

        Characters and stops are never split between pieces, and the model stops at a stop. Without
        `with_prompt` there is only what the model adds.

        Raises:
            UserError: as a call, before the first piece.
        """
        ids = self._ids(prompt)
        chunks = self.generator.stream(self.params, ids, tokens)
        written = pieces(chunks, self._decoder(ids), self.stop)
        begins = self._begins(prompt) if with_prompt else ""
        return itertools.chain([begins] if begins else [], written)

    def added_pieces(self, prompt: Sequence[int], tokens: int) -> Pieces[str, None, bool]:
        """The text that the model adds to a prompt's ids, in pieces as of `stream`.

        Prompts of similar lengths share compiled programs. Returns whether the text was cut.
        """
        written = 0

        def counted() -> Iterator[Sequence[int]]:
            nonlocal written
            for ids in self.generator.stream(self.params, prompt, tokens, shares=True):
                written += len(ids)
                yield ids

        yield from pieces(counted(), self._decoder(prompt), self.stop)
        return written >= tokens

    def check(self, ids: Sequence[int], what: str) -> None:
        """Raises UserError if the model does not know an id. what: the text, for the message."""
        vocab_size = self.generator.vocab_size
        if max(ids) >= vocab_size:
            raise UserError(
                f"{what} has id {max(ids)}, but the model knows only 0 to {vocab_size - 1}; leave "
                f"{spelling(self.tokenizer, max(ids))} out of it, or use the tokenizer that the "
                "model was trained with"
            )

    def _ids(self, prompt: str) -> list[int]:
        """The ids that the model reads first."""
        tokenizer = self.tokenizer
        ids = with_begin(tokenizer, _ids(prompt, tokenizer, self._special))
        ids += [] if self._writing.continues and ids else [tokenizer.end_of_document]
        self.check(ids, f"the prompt {quoted(repr(prompt))}")
        return ids

    def _begins(self, prompt: str) -> str:
        """The beginning of a text: the prompt, if the model continues it."""
        return prompt if self._writing.continues else ""

    def _decoder(self, ids: Sequence[int]) -> Callable[[Sequence[int]], str]:
        """Makes the function from the ids that follow a prompt's to their text."""
        tokenizer = self.tokenizer
        return (
            partial(continuation, tokenizer, ids) if self._writing.continues else tokenizer.decode
        )

    @property
    def _special(self) -> Sequence[str]:
        return family_of(self.program.config.model).special


def _ids(prompt: str, tokenizer: Tokenizer, special: Sequence[str]) -> list[int]:
    """The ids of a prompt that may name special tokens."""
    names = {name: tokenizer.token_id(name) for name in special if name in prompt}
    ids: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, names))})", prompt) if names else [prompt]:
        number = names.get(piece)
        ids += tokenizer.encode(piece).tolist() if number is None else [number]
    return ids


class ChatWriter:
    """Answers chats in the way that the run's chat template writes them.

    An answer ends at an end of the tokenizer, at a stop, or where the template ends a turn.

    Args:
        writer: of the model.
        template: a file in place of the run's template.
        records: whether chats come as records in the form of the run's data; otherwise they are
            objects with `messages`, and maybe `tools`.

    Raises:
        UserError: there is no chat template, or the model does not continue a text.
    """

    def __init__(
        self, writer: Writer, template: str | None = None, *, records: bool = False
    ) -> None:
        config = writer.program.config
        writing = family_of(config.model).writing
        if writing is None or not writing.continues:
            raise UserError(
                f"model.family={config.model.family} cannot answer chats; use a decoder such as gpt"
            )
        data = config.data
        if not (records and data.has_chats):
            usual: Any = {"format": MESSAGES, "messages_field": MESSAGES, "tools_field": "tools"}
            data = dataclasses.replace(data, text_field="text", prompt_field=None, **usual)
        data = dataclasses.replace(
            data,
            chat_template=template or data.chat_template,
            chat_date=data.chat_date or datetime.date.today().isoformat(),
        )
        self.chats = Chats(data, writer.tokenizer)
        ends, stops = self.chats.turn_end()
        self._longest = config.model.seq_length
        self._writer = dataclasses.replace(writer, ends=ends, stop=[*writer.stop, *stops])

    def asked(self, record: Mapping[str, Any]) -> list[int]:
        """The ids of a record's chat, up to the answer.

        Raises:
            UserError: it is not a chat, has its answer, or leaves no room for one in the model.
        """
        ids = self.chats.asked(record)
        if not ids:
            raise UserError("the chat template writes nothing before an answer; repair it")
        self._writer.check(ids, "the chat")
        if len(ids) >= self._longest:
            raise UserError(
                f"the chat has {len(ids)} tokens, which leaves no room for an answer in "
                f"model.seq_length={self._longest}; begin a new one, or leave messages out"
            )
        return ids

    def answers(self, chats: Sequence[Sequence[int]], tokens: int) -> Iterator[str]:
        """The answers to chats, in order. chats: their ids. tokens: of an answer at most."""
        return self._writer.added(chats, [self._room(ids, tokens) for ids in chats])

    def stream(self, chat: Sequence[int], tokens: int) -> Pieces[str, None, bool]:
        """An answer in pieces; returns whether it was cut. Arguments as of `answers`."""
        return self._writer.added_pieces(chat, self._room(chat, tokens))

    def _room(self, ids: Sequence[int], tokens: int) -> int:
        return min(tokens, self._longest - len(ids))
