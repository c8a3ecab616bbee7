"""`jaxptd data`: tokenizes text once into a `.bin` file, which training memory-maps.

Without `--out` it counts what a run would read, as the run says when it starts.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jaxptd.commands.run_options import add_config, named_config
from jaxptd.common_options import add_words, path_option, pattern_option
from jaxptd.config import BeginToken, Config, DataConfig, SpecialTokens
from jaxptd.data.corpora import tokenize
from jaxptd.data.corpus import about_begin, about_spellings
from jaxptd.data.lengths import Piece, Records
from jaxptd.data.packing import Packing
from jaxptd.data.sources import find_files
from jaxptd.data.token_files import is_token_file, write_bin_arrays
from jaxptd.data.tokenizers import load_tokenizer
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.models.families import open_data_of, tokenizer_of
from jaxptd.stores import Place


def main(argv: Sequence[str] | None = None) -> None:
    """Tokenizes text into one .bin file of token ids, or counts what a run would read."""
    args = parser().parse_args(argv)
    if args.out is None:
        _count(args)
        return
    source, data, seq_length = _corpus(args)
    _check_kept(data)
    _check_out(args.out)
    tokenizer = load_tokenizer(
        data.tokenizer, special_tokens=data.special_tokens, begin_token=data.begin_token
    )
    assert not isinstance(source, dict)
    files = find_files(source)
    _check_text(files)
    spelled: Counter[str] = Counter()
    texts = partial(tokenize, tokenizer=tokenizer, spelled=spelled, text_field=data.text_field)
    records = Records(data, seq_length)
    read = (Piece(ids, None) for ids in _with_progress(files, texts, quiet=args.quiet))
    lengths: list[int] = []
    documents = _counting((piece.ids for piece in records.fit(read)), lengths)
    sizes = (tokenizer.vocab_size, tokenizer.end_of_document)
    tokens = write_bin_arrays(args.out, documents, vocab_size=sizes[0], end_of_document=sizes[1])
    written: dict[str, Any] = {
        "out": str(args.out),
        "tokens": tokens,
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
    if not args.quiet:
        spellings = about_spellings(spelled, tokenizer)
        packed = _about_packing(data, np.array(lengths, np.int32), seq_length)
        for remark in (*about_begin(tokenizer), *records.remarks(), *spellings, *packed):
            print(remark, file=sys.stderr)


def _count(args: Any) -> None:
    """Prints what a run with a config would say about its data."""
    config = named_config(args)
    if config is None:
        raise UserError(
            "required: --out F, the .bin file to write, or --config F, to count what a run would "
            "read; see --help"
        )
    source, data, _ = _corpus(args)
    config = dataclasses.replace(config, data=dataclasses.replace(data, source=source))
    found = open_data_of(config, tokenizer_of(config))
    splits = {"training": found.train, "validation": found.validation}
    tokens = {f"{name}_tokens": x.num_tokens if x else 0 for name, x in splits.items()}
    if args.json:
        print(json.dumps({**tokens, "remarks": found.remarks}))
    elif not args.quiet:
        held_out = f", {tokens['validation_tokens']} tokens for validation"
        print(*found.remarks, f"{found.train.amount}{held_out}", sep="\n")


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd data --source stdlib --out stdlib.bin",
        "jaxptd data --source 'text/*.txt' more.jsonl --tokenizer tokenizer.json --out train.bin",
        "jaxptd data --config quickstart --out quickstart.bin",
        "jaxptd data --config chats.yaml     (counts tokens, and records that are too long)",
    )
    parser = Parser(prog="jaxptd data", description=main.__doc__, examples=examples)
    help_text = (
        "stdlib, or paths or globs of text, .jsonl, .csv or .parquet files, plain or compressed"
    )
    names = ("--source", "--data.source")
    parser.add_argument(
        *names, nargs="+", action="extend", type=pattern_option, metavar="F", help=help_text
    )
    help_text = "bytes (the default), or the path of a tokenizer.json or its folder"
    parser.add_argument("--tokenizer", "--data.tokenizer", metavar="F", help=help_text)
    for name, kind in (("special_tokens", SpecialTokens), ("begin_token", BeginToken)):
        options = (f"--{name.replace('_', '-')}", f"--data.{name}")
        parser.add_argument(*options, choices=get_args(kind), help=f"like data.{name} of a config")
    help_text = "record field that holds the document; default: text"
    parser.add_argument("--text-field", "--data.text_field", metavar="NAME", help=help_text)
    add_config(parser)
    help_text = "the .bin file to write, which must not exist yet; without it, the data is counted"
    parser.add_argument("--out", type=path_option, metavar="F", help=help_text)
    add_words(parser, json="what was written", quiet="print nothing, not even progress")
    return parser


def _counting(documents: Iterator[np.ndarray], lengths: list[int]) -> Iterator[np.ndarray]:
    """Yields the documents, and adds the tokens of each to `lengths`."""
    for document in documents:
        lengths.append(len(document))
        yield document


def _about_packing(data: DataConfig, tokens: np.ndarray, seq_length: int) -> Iterator[str]:
    """Says how much of a run's sequences is padding, if its config keeps documents whole."""
    if data.documents == "whole":
        try:
            yield Packing(tokens, seq_length).summary
        except UserError as error:
            yield f"warning: {error}"


def _corpus(args: Any) -> tuple[str | list[str] | dict[str, float], DataConfig, int]:
    """The source, how to read it, and the model's seq_length: from the options, else the config."""
    config = named_config(args) or Config()
    data, given_one = config.data, bool(args.config or args.run_dir)
    source = args.source or (data.source if given_one else None)
    if source is None:
        raise UserError(
            "--source is required: text files or stdlib; or give --config F, which names them"
        )
    names = ("tokenizer", "special_tokens", "begin_token", "text_field")
    given = {name: x for name in names if (x := getattr(args, name)) is not None}
    return source, dataclasses.replace(data, source=source, **given), config.model.seq_length


def _check_kept(data: DataConfig) -> None:
    """Raises UserError for what a `.bin` cannot hold."""
    if data.prompt_field is not None:
        raise UserError(
            f"data.prompt_field={data.prompt_field!r} in the config: a .bin cannot tell "
            "prompts from answers; train on the .jsonl directly"
        )
    if data.rejected_field is not None:
        raise UserError(
            f"data.rejected_field={data.rejected_field!r} in the config: a .bin holds no pairs; "
            "train on the .jsonl directly"
        )
    if data.has_chats:
        raise UserError(
            "the config reads chats, and a .bin does not tell which of their tokens count in the "
            "loss, or where one ends; train on the records directly, or leave out --out to count"
        )
    if data.too_long == "cut":
        raise UserError(
            "data.too_long=cut in the config: a .bin shows by their last tokens where records end, "
            "and records that are cut lose them; train on the text directly, or use drop"
        )
    if isinstance(data.source, dict):
        raise UserError(
            "data.source in the config is a mixture, but a .bin holds one source; convert them one "
            "by one with --source, and mix the .bin files"
        )


def _check_out(path: Path) -> None:
    """Raises UserError for an output that exists or does not end in .bin."""
    if path.suffix != ".bin":
        raise UserError(f"--out {path}: token files are recognized by their name; end it in .bin")
    for taken in (path, path.with_suffix(".idx")):
        if os.path.exists(taken):
            raise UserError(f"--out {path}: {taken} exists; choose another name, or remove it")


def _check_text(files: Sequence[Place]) -> None:
    for path in files:
        if is_token_file(path):
            raise UserError(f"--source {path} already holds tokens; name text or .jsonl files")


def _with_progress(
    files: Sequence[Place], read: Callable[[list[Place]], Iterator[np.ndarray]], *, quiet: bool
) -> Iterator[np.ndarray]:
    """Yields the documents of files and prints progress.

    On a terminal, one line is rewritten; elsewhere a line follows every 10 s.
    """
    pause, end = (0.5, "\r") if sys.stderr.isatty() else (10.0, "\n")
    started = shown = time.monotonic()
    count = 0
    try:
        for number, path in enumerate(files, start=1):
            for document in read([path]):
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
        if end == "\r" and shown > started:
            print(file=sys.stderr)  # so that later output, or an error, starts on a new line


if __name__ == "__main__":
    run_command(main)
