"""`python -m jaxptd.data`: tokenizes text once, into a nanoGPT `.bin` that training maps."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxptd.commands.words import add_config, add_words, named_config, path_option, pattern_option
from jaxptd.data.corpora import tokenize
from jaxptd.data.sources import find_files
from jaxptd.data.token_files import NANOGPT_VOCAB_SIZE, is_token_file, write_bin_arrays
from jaxptd.data.tokenizers import BYTES, Tokenizer, load_tokenizer
from jaxptd.errors import Parser, UserError, run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Tokenizes text into one nanoGPT .bin file (uint16 ids), for data.source."""
    args = parser().parse_args(argv)
    source, name = _corpus(args)
    _check_out(args.out)
    tokenizer = load_tokenizer(name)
    _check_vocabulary(name, tokenizer)
    files = find_files(source)
    _check_text(files)
    documents = _tokenize(files, tokenizer, quiet=args.quiet)
    written: dict[str, Any] = {
        "out": str(args.out),
        "tokens": write_bin_arrays(args.out, documents),
        "files": len(files),
        "vocabulary": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
    }
    if args.json:
        print(json.dumps(written))
    elif not args.quiet:
        print(
            "{out}: {tokens} tokens from {files} files; vocabulary {vocabulary}, "
            "end of document {end_of_document}".format(**written)
        )


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd data --source stdlib --out stdlib.bin",
        "jaxptd data --source 'text/*.txt' more.jsonl --tokenizer tokenizer.json --out train.bin",
        "jaxptd data --config quickstart --out quickstart.bin",
    )
    made = Parser(prog="jaxptd data", description=main.__doc__, examples=examples)
    help_text = "stdlib, or paths or globs of text and .jsonl"
    names = ("--source", "--data.source")
    made.add_argument(
        *names, nargs="+", action="extend", type=pattern_option, metavar="F", help=help_text
    )
    help_text = "bytes (the default), or the path of a tokenizers JSON, or of its folder"
    made.add_argument("--tokenizer", "--data.tokenizer", metavar="F", help=help_text)
    add_config(made)
    help_text = "the .bin file to write; it must not exist yet"
    made.add_argument("--out", type=path_option, metavar="F", required=True, help=help_text)
    add_words(made, json="what was written", quiet="print nothing, no progress either")
    return made


def _corpus(args: Any) -> tuple[str | Sequence[str], str]:
    """The source and the tokenizer, from the options, else from the config."""
    config = named_config(args)
    if config and config.data.prompt_field is not None:
        raise UserError(
            f"data.prompt_field={config.data.prompt_field!r} in the config: a .bin does not tell "
            "prompts from answers; train on the .jsonl itself, which is tokenized then"
        )
    named = config.data.source if config else None
    source, tokenizer = args.source or named, config.data.tokenizer if config else BYTES
    if isinstance(source, dict):
        raise UserError(
            "data.source in the config is a mixture, a .bin is one source; name one with --source, "
            "and give the .bin of each its weight"
        )
    if source is None:
        raise UserError("give --source, files of text or stdlib; or --config F, which names them")
    return source, args.tokenizer or tokenizer


def _check_out(path: Path) -> None:
    """Raises UserError for an output that exists, or that would not be read as a nanoGPT file."""
    if path.suffix != ".bin":
        raise UserError(f"--out {path}: token files are known by their name; end it in .bin")
    for taken in (path, path.with_suffix(".idx")):
        if os.path.exists(taken):
            raise UserError(f"--out {path}: {taken} exists; choose another name, or remove it")


def _check_vocabulary(name: str, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > NANOGPT_VOCAB_SIZE:
        raise UserError(
            f"--tokenizer {name} has {tokenizer.vocab_size} ids, a nanoGPT .bin holds "
            f"{NANOGPT_VOCAB_SIZE}; use a smaller vocabulary, or let training tokenize the text"
        )


def _check_text(files: Sequence[Path]) -> None:
    for path in files:
        if is_token_file(path):
            raise UserError(f"--source {path} holds tokens already; name text or .jsonl files")


def _tokenize(files: Sequence[Path], tokenizer: Tokenizer, *, quiet: bool) -> Iterator[np.ndarray]:
    """Tokenizes and prints progress: on a terminal one line, rewritten; else a line every 10 s."""
    pause, end = (0.5, "\r") if sys.stderr.isatty() else (10.0, "\n")
    started, shown, count = time.monotonic(), -pause, 0
    try:
        for number, path in enumerate(files, start=1):
            for document in tokenize([path], tokenizer):
                yield document
                count += len(document)
                now = time.monotonic()
                if not quiet and now - shown >= pause:
                    rate = count / max(now - started, 1e-9) / 1e6
                    line = f"file {number} of {len(files)}, {count} tokens, {rate:.1f} M tokens/s"
                    with contextlib.suppress(OSError):
                        print(f"{line:<78}", end=end, file=sys.stderr, flush=True)
                    shown = now
    finally:
        if end == "\r" and not quiet:
            print(file=sys.stderr)  # later output, an error too, begins on a line of its own


if __name__ == "__main__":
    run_command(main)
