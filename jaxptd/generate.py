"""Generates text with a trained model and a cache of keys and values, or masks of images.

`python -m jaxptd.generate --run-dir runs/quickstart --prompt "def " --tokens 200` loads the newest
good checkpoint of a run. Text that fills the model's seq_length is continued from its last half.
An encoder-decoder answers the prompt instead. An image model writes the classes of pixels as PNG
files, each with an overlay, or prints the classes of whole images.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxptd.commands.command_line import load_config
from jaxptd.common_options import add_words, path_option, place_option
from jaxptd.display import callable_module
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.fields import checked
from jaxptd.hf.load import load_model
from jaxptd.mesh import Layout
from jaxptd.models.families import family_of, tokenizer_of
from jaxptd.params import Params
from jaxptd.run.generator import Generator
from jaxptd.run.progress import printable
from jaxptd.run.sampling import Sampling
from jaxptd.run.speculative import Drafts
from jaxptd.run.writer import ChatWriter, Writer
from jaxptd.step import Program
from jaxptd.stores import Place, StorePath, place
from jaxptd.vision.masks import held_out_inputs, inputs_of, write_classes

__all__ = ["Generator", "Sampling", "Writer", "check_tokens", "generate", "main", "parser"]

MOST_TOKENS, DEFAULT_TOKENS = 1_000_000, 200  # per text
MOST_IMAGES, DEFAULT_IMAGES = 10_000, 8
# Options that apply only to text, and only to images.
OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
OF_TEXT = ("prompt", "prompts", "tokens", *OF_SAMPLING, "stop", "speculative")
OF_IMAGES = ("images", "samples", "out")
# Devices along cp and ep generate the same text; those along dp share the texts of a file.
AXES = ("tp", "pp", "row", "col", "cp", "ep", "dp")


def check_tokens(name: str, tokens: int) -> None:
    """Raises UserError for a negative or absurdly large number of tokens."""
    if not 0 <= tokens <= MOST_TOKENS:
        raise UserError(f"{name} {tokens}: use 0 to {MOST_TOKENS} tokens")


@checked("jaxptd.generate")
def generate(
    run_dir: str | Place,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = Sampling.temperature,
    top_k: int = Sampling.top_k,
    top_p: float = Sampling.top_p,
    min_p: float = Sampling.min_p,
    repetition_penalty: float = Sampling.repetition_penalty,
    seed: int = 0,
    tp: int = 1,
    stop: Sequence[str] = (),
    speculative: bool = False,
    ema: bool = False,
    layout: Layout | None = None,
    platform: Literal["auto", "cpu"] = "auto",
) -> str:
    """Generates text with a run's model: the prompt and its continuation, or an answer.

    The text ends at any of the model's end tokens: all of `eos_token_id` of a Hugging Face
    directory.

    `jaxptd.load(run_dir)` restores a model once for several texts.

    >>> print(generate("runs/quickstart", "def ", tokens=100))  # doctest: +SKIP

    Args:
        run_dir: directory of a run, or a Hugging Face model directory.
        prompt: text to continue; empty starts a document.
        tokens: number of tokens to generate.
        temperature: sampling temperature; 0 takes the most likely token.
        top_k: draw from the k most likely tokens; 0 from all.
        top_p: draw from the most likely tokens that together have this probability.
        min_p: draw from tokens with this share of the most likely one's probability.
        repetition_penalty: above 1, tokens that the text has already are less likely.
        seed: seed for sampling.
        tp: number of devices to split the model over.
        stop: strings that also end the text; they are left out.
        speculative: whether the modules of `model.mtp` draft tokens that the model checks, several
            in one pass; the text is the same.
        ema: generate with the moving average of the parameters (`optimizer.ema_decay`).
        layout: layout with other axes than tp.
        platform: as `train.platform`.

    Raises:
        UserError: there is no run, no good checkpoint, or too few devices.
    """
    check_tokens("tokens", tokens)
    sampling = Sampling(temperature, top_k, seed, top_p, min_p, repetition_penalty)
    layout = layout or Layout(tp=tp)
    program, params = load_model(
        place(run_dir), layout=layout, platform=platform, modules=speculative, ema=ema
    )
    drafts = Drafts() if speculative else None
    tokenizer = tokenizer_of(program.config)
    return Writer(program, params, tokenizer, sampling, stop, drafts)(prompt, tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Generates text with the model of a run, or segments or classifies images."""
    args = parser().parse_args(argv)
    check_options(args)
    program, params = load(args, modules=bool(args.speculative))
    family = family_of(program.config.model)
    unused, words = (OF_TEXT, "text") if family.classes else (OF_IMAGES, "images")
    if given := [name for name in unused if getattr(args, name) is not None]:
        raise UserError(
            f"--{given[0].replace('_', '-')} is an option for {words}, but the model has "
            f"model.family={program.config.model.family}; leave it out"
        )
    for line in (_classes if family.classes else _text)(args, program, params):
        print(line, flush=True)
    return 0


def check_options(args: Any) -> None:
    """Raises UserError for numbers that no model accepts, before a model is loaded."""
    if args.tokens is not None and not 1 <= args.tokens <= MOST_TOKENS:
        raise UserError(f"--tokens {args.tokens}: use 1 to {MOST_TOKENS} tokens")
    if args.samples is not None and not 1 <= args.samples <= MOST_IMAGES:
        raise UserError(f"--samples {args.samples}: use 1 to {MOST_IMAGES} images")
    if args.samples is not None and args.images:
        raise UserError("--samples (held-out images) and --images are both given; use one")
    if args.prompts is not None:
        if args.prompt is not None:
            raise UserError("--prompt and --prompts are both given; use one")
        args.prompts = read_prompts(args.prompts)
    sampling(args)


def load(args: Any, *, modules: bool = False) -> tuple[Program, Params]:
    """Loads the model that the options name; see `load_model`."""
    layout = Layout(**{axis: getattr(args, axis) for axis in AXES})
    chosen = {"platform": args.platform, "modules": modules, "ema": args.ema}
    return load_model(_run_dir(args), layout=layout, **chosen)


def read_prompts(path: Path) -> list[Any]:
    """The prompts in a file: its lines, or the records of JSON lines in a `.jsonl`.

    If the first record has a `prompt`, all have one. Otherwise they are chats.

    Raises:
        UserError: it cannot be read, or a line is not such a record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"--prompts {path}: {reason}; name a text file of prompts") from error
    if not lines:
        raise UserError(f"--prompts {path}: it is empty; write a prompt on each line")
    if path.suffix != ".jsonl":
        return lines
    records: list[Any] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not _has_its_kind(record, [*records, record][0]):
            where = f"--prompts {path}, line {number}"
            raise UserError(f'{where}: use an object such as {{"prompt": "def "}}, or with a chat')
        records.append(record)
    return [each["prompt"] for each in records] if "prompt" in records[0] else records


def _has_its_kind(record: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    """True for a record with a prompt, or without if the first one has none."""
    return isinstance(record.get("prompt"), str) if "prompt" in first else "prompt" not in record


def sampling(args: Any) -> Sampling:
    return Sampling(**{n: getattr(args, n) for n in OF_SAMPLING if getattr(args, n) is not None})


def _text(args: Any, program: Program, params: Params) -> Iterator[str]:
    """Yields what the command prints for text."""
    prompt, tokens = args.prompt or "", args.tokens or DEFAULT_TOKENS
    drafts = Drafts() if args.speculative else None
    tokenizer = tokenizer_of(program.config)
    write = Writer(program, params, tokenizer, sampling(args), args.stop or (), drafts)
    if args.prompts is not None:
        yield from map(json.dumps, _records(write, args.prompts, tokens))
        return
    if not (drafts or args.json) and sys.stdout.isatty():
        for piece in write.stream(prompt, tokens, with_prompt=not args.quiet):
            print(printable(piece, sys.stdout.encoding), end="", flush=True)
        yield ""  # ends the last line
        return
    text = write(prompt, tokens)
    if args.json:
        counts = {"drafts": dataclasses.asdict(drafts)} if drafts else {}
        yield json.dumps({"prompt": prompt, "text": text} | counts)
        return
    text = text.removeprefix(prompt) if args.quiet else text
    yield printable(text, sys.stdout.encoding)
    if drafts and not args.quiet:
        print(drafts, file=sys.stderr)


def _records(write: Writer, prompts: Sequence[Any], tokens: int) -> Iterator[dict[str, Any]]:
    """Yields prompts with their texts, or records of chats with the answers."""
    if isinstance(prompts[0], str):
        texts = write.write_all(prompts, tokens)
        for prompt, text in zip(prompts, texts, strict=True):
            yield {"prompt": prompt, "text": text}
        return
    chat, asked = ChatWriter(write, records=True), []
    for number, record in enumerate(prompts, 1):
        try:
            asked.append(chat.asked(record))
        except UserError as error:
            raise UserError(f"--prompts, line {number}: {error}") from error
    for record, text in zip(prompts, chat.answers(asked, tokens), strict=True):
        yield chat.chats.answered(record, text)


def _classes(args: Any, program: Program, params: Params) -> Iterator[str]:
    """Yields what the command prints for images: mask files, or classes."""
    if args.images:
        images = inputs_of(program.config, args.images)
    else:
        images = held_out_inputs(program.config, args.samples or DEFAULT_IMAGES)
    folder = args.out or _run_dir(args) / "masks"
    if isinstance(folder, StorePath):
        raise UserError(f"--out is required: masks are written on a disk, not to {folder}")
    rows = write_classes(program, params, images, folder=folder)
    if args.json:
        yield json.dumps(rows)
    else:
        yield from (" ".join(str(x) for x in list(row.values())[args.quiet :]) for row in rows)


def add_run(parser: Parser) -> None:
    """Adds the options that name a run."""
    add = parser.add_argument
    help_text = "directory or URL of a run, or a Hugging Face folder"
    add("--run-dir", type=place_option, metavar="D", help=help_text)
    add("--config", metavar="F", help="config of the run, instead of its directory")
    help_text = "use the moving average (optimizer.ema_decay)"
    parser.add_argument("--ema", action="store_true", help=help_text)


def add_sampling(parser: Parser) -> None:
    """Adds the options of how tokens are drawn, and of the texts that end one."""
    add = parser.add_argument
    help_text = f"0 always takes the most likely token; default: {Sampling.temperature}"
    add("--temperature", type=float, metavar="X", help=help_text)
    help_text = f"only the k likeliest tokens, 0 for all; default: {Sampling.top_k}"
    add("--top-k", type=int, metavar="N", help=help_text)
    help_text = "only the likeliest, with X together; default: 1, all"
    add("--top-p", type=float, metavar="X", help=help_text)
    help_text = "only those with X of the likeliest's; default: 0"
    add("--min-p", type=float, metavar="X", help=help_text)
    help_text = "above 1, fewer repetitions; default: 1"
    add("--repetition-penalty", type=float, metavar="X", help=help_text)
    add("--seed", type=int, metavar="N", help=f"seed of the sampling; default: {Sampling.seed}")
    help_text = "end before this text as well; repeatable"
    add("--stop", action="append", metavar="TEXT", help=help_text)


def add_layout(parser: Parser) -> None:
    """Adds the options of the devices."""
    add = parser.add_argument
    for axis in AXES:
        names = ("--tp", "--layout.tp") if axis == "tp" else (f"--layout.{axis}",)
        add(*names, dest=axis, type=int, default=1, metavar="N", help="devices; default: 1")
    help_text = "cpu simulates devices; default: auto"
    platforms = ("auto", "cpu")
    add("--platform", "--train.platform", choices=platforms, default="auto", help=help_text)


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd generate --run-dir runs/quickstart --prompt 'class '",
        "jaxptd generate --run-dir runs/swin-unet-shapes --images slices/ --out masks",
    )
    usage = "jaxptd generate --run-dir D [--prompt TEXT | --images F ...] [options]"
    parser = Parser(
        prog="jaxptd generate", usage=usage, description=main.__doc__, examples=examples
    )
    add_run(parser)
    add = parser.add_argument
    add("--prompt", help="text to continue; empty starts a document")
    help_text = "prompt on each line, or JSON lines of prompts or chats"
    add("--prompts", type=path_option, metavar="F", help=help_text)
    add("--tokens", type=int, metavar="N", help=f"tokens to generate; default: {DEFAULT_TOKENS}")
    add_sampling(parser)
    help_text = "modules of model.mtp draft tokens; the same text"
    add("--speculative", action="store_true", default=None, help=help_text)
    help_text = "image models: .npz, .npy, .png files or folders"
    add("--images", type=path_option, nargs="+", metavar="F", help=help_text)
    help_text = f"image models: held-out images; default: {DEFAULT_IMAGES}"
    add("--samples", type=int, metavar="N", help=help_text)
    help_text = "folder for masks; default: masks in the run's"
    add("--out", type=path_option, metavar="D", help=help_text)
    add_layout(parser)
    quiet = "print only the generated text, or only the file names"
    add_words(parser, json="prompt and text, or images and files,", quiet=quiet)
    return parser


def _run_dir(args: Any) -> Place:
    """The directory that `--run-dir` or `--config` names."""
    if (args.run_dir is None) == (args.config is None):
        raise UserError("--run-dir is required: the directory of a run; or give its --config F")
    run_dir: Place = args.run_dir or place(load_config(args.config).train.run_dir)
    return run_dir


callable_module(__name__)
if __name__ == "__main__":
    run_command(main)
