"""`python -m jaxptd.data`: tokenizes text once, into a nanoGPT `.bin` that training maps."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxptd.data.corpora import tokenize
from jaxptd.data.sources import find_files
from jaxptd.data.token_files import NANOGPT_VOCAB_SIZE, is_token_file, write_bin_arrays
from jaxptd.data.tokenizers import Tokenizer, load_tokenizer
from jaxptd.errors import Parser, UserError, run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Tokenizes text into one nanoGPT .bin file (uint16 ids), for data.source."""
    parser = Parser(prog="python -m jaxptd.data", description=main.__doc__)
    parser.add_argument(
        "--source",
        nargs="+",
        action="extend",
        required=True,
        help="stdlib, or paths or globs of text and .jsonl",
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        help="bytes (the default), or the path of a tokenizers JSON file",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the .bin file to write; it must not exist yet"
    )
    args = parser.parse_args(argv)
    _check_out(args.out)
    tokenizer = load_tokenizer(args.tokenizer)
    _check_vocabulary(args.tokenizer, tokenizer)
    files = find_files(args.source)
    _check_text(files)
    count = write_bin_arrays(args.out, _tokenize(files, tokenizer))
    print(
        f"{args.out}: {count} tokens from {len(files)} files; vocabulary {tokenizer.vocab_size}, "
        f"end of document {tokenizer.end_of_document}"
    )


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


def _tokenize(files: Sequence[Path], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Tokenizes and prints progress: on a terminal one line, rewritten; else a line every 10 s."""
    pause, end = (0.5, "\r") if sys.stderr.isatty() else (10.0, "\n")
    started, shown, count = time.monotonic(), -pause, 0
    try:
        for number, path in enumerate(files, start=1):
            for document in tokenize([path], tokenizer):
                yield document
                count += len(document)
                now = time.monotonic()
                if now - shown >= pause:
                    rate = count / max(now - started, 1e-9) / 1e6
                    line = f"file {number} of {len(files)}, {count} tokens, {rate:.1f} M tokens/s"
                    with contextlib.suppress(OSError):
                        print(f"{line:<78}", end=end, file=sys.stderr, flush=True)
                    shown = now
    finally:
        if end == "\r":
            print(file=sys.stderr)  # later output, an error too, begins on a line of its own


if __name__ == "__main__":
    run_command(main)
