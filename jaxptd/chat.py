"""Talks with the model of a run: messages in, answers out, as its chat template writes them.

`jaxptd chat --run-dir runs/chats` reads a message from each line, at a terminal or from a pipe, and
writes the answer while the model generates it.
"""

import json
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from jaxptd.common_options import add_words, path_option
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.generate import MOST_TOKENS, add_layout, add_run, add_sampling, load, sampling
from jaxptd.models.families import tokenizer_of
from jaxptd.run.progress import printable
from jaxptd.run.writer import ChatWriter, Writer

NEW, LEAVE = "/new", "/quit"
DEFAULT_TOKENS = 1024  # of an answer


def main(argv: Sequence[str] | None = None) -> int:
    """Talks with the model of a run; each line is a message."""
    args = parser().parse_args(argv)
    if not 1 <= args.tokens <= MOST_TOKENS:
        raise UserError(f"--tokens {args.tokens}: use 1 to {MOST_TOKENS} tokens")
    sampled = sampling(args)
    program, params = load(args)
    writer = Writer(program, params, tokenizer_of(program.config), sampled, args.stop or ())
    chat = ChatWriter(writer, args.template and str(args.template))
    begin = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = list(begin)
    for line in _lines(quiet=args.quiet):
        if line == NEW:
            messages = list(begin)
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            pieces = chat.stream(chat.asked({"messages": asked}), args.tokens)
        except UserError as error:
            if not sys.stdin.isatty():
                raise
            print(f"error: {error}", file=sys.stderr)  # the message is left out
            continue
        messages = [*asked, {"role": "assistant", "content": _shown(pieces, args)}]
    return 0


def _lines(*, quiet: bool) -> Iterator[str]:
    """Yields the lines of stdin that are not empty, up to the one that leaves."""
    asks = sys.stdin.isatty()
    if asks and not quiet:
        print(f"{NEW} begins a new conversation, {LEAVE} leaves", file=sys.stderr)
    while True:
        try:
            line = input("> " if asks else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise UserError("a message is not UTF-8; write it as UTF-8") from error
        if line == LEAVE:
            return
        if line:
            yield line


def _shown(pieces: Generator[str, None, bool], args: Any) -> str:
    """Prints an answer while it is written, and returns it."""
    text, cut = "", None
    while cut is None:
        try:
            piece = next(pieces)
        except StopIteration as end:
            cut = bool(end.value)
        else:
            text += piece
            if not args.json:
                print(printable(piece, sys.stdout.encoding), end="", flush=True)
    print(json.dumps({"role": "assistant", "content": text}) if args.json else "", flush=True)
    if cut and not args.quiet:
        print("(cut: --tokens, or the model's length, is reached)", file=sys.stderr)
    return text


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd chat --run-dir runs/chats --system 'Answer in one sentence.'",
        "jaxptd chat --run-dir models/qwen3 --temperature 0 --json < questions.txt",
    )
    parser = Parser(prog="jaxptd chat", description=main.__doc__, examples=examples)
    add_run(parser)
    add = parser.add_argument
    add("--system", metavar="TEXT", help="system message before the conversation")
    help_text = "Jinja file in place of the run's chat template"
    add("--template", "--data.chat_template", type=path_option, metavar="F", help=help_text)
    help_text = f"tokens of an answer at most; default: {DEFAULT_TOKENS}"
    add("--tokens", type=int, default=DEFAULT_TOKENS, metavar="N", help=help_text)
    add_sampling(parser)
    add_layout(parser)
    add_words(parser, json="each answer as a message", quiet="print only the answers")
    return parser


if __name__ == "__main__":
    run_command(main)
