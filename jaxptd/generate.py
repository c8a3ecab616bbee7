"""Generates text with a trained model and a cache of keys and values, or masks of images.

`python -m jaxptd.generate --run-dir runs/quickstart --prompt "def " --tokens 200` loads the newest
good checkpoint of a run. Text that fills the model's seq_length is continued from its last half.
An encoder-decoder answers the prompt instead. An image model writes the classes of pixels as PNG
files, each with an overlay, or prints the classes of whole images.
"""

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from jaxptd.commands.command_line import load_config
from jaxptd.common_options import add_words, path_option, place_option
from jaxptd.data.tokenizers import (
    Tokenizer,
    continuation,
    pieces,
    spelling,
    until_stop,
    with_begin,
)
from jaxptd.display import callable_module
from jaxptd.errors import Parser, UserError, quoted, run_command
from jaxptd.fields import checked
from jaxptd.hf.load import load_model
from jaxptd.mesh import Layout
from jaxptd.models.families import family_of, tokenizer_of
from jaxptd.params import Params
from jaxptd.run.generator import Generator, Sampling
from jaxptd.run.progress import printable
from jaxptd.run.speculative import Drafts
from jaxptd.step import Program
from jaxptd.stores import Place, StorePath, place
from jaxptd.vision.masks import held_out_inputs, inputs_of, write_classes

__all__ = [
    *("Generator", "Sampling", "check_tokens", "generate", "main", "parser", "stream_text"),
    "write_text",
]

MOST_TOKENS, DEFAULT_TOKENS = 1_000_000, 200  # per text
MOST_IMAGES, DEFAULT_IMAGES = 10_000, 8
# Options that apply only to text, and only to images.
OF_TEXT = ("prompt", "tokens", "temperature", "top_k", "seed", "stop", "speculative")
OF_IMAGES = ("images", "samples", "out")
AXES = ("tp", "pp", "row", "col", "cp", "ep")  # devices along cp and ep generate the same text


def write_text(
    program: Program,
    params: Params,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
    drafts: Drafts | None = None,
) -> str:
    """The prompt and the text that the model adds. An empty prompt starts a new document.

    The text ends before the first end token or the first of the texts in `stop`. For an
    encoder-decoder only the answer is returned, and the prompt may name special tokens such as
    <extra_id_0>. `drafts` counts those of MTP modules; None: they make none.

    Raises:
        UserError: the model does not write text, its vocabulary lacks an id of the prompt, or the
            prompt is too long; or with drafts, the model has no MTP modules.
    """
    ids, vocab_size = _prompt_ids(program, tokenizer, prompt)
    write = Generator(program, vocab_size, sampling, tokenizer.ends, drafts)
    text = _decoder(program, tokenizer, ids)(write(params, ids, tokens))
    return _begins(program, prompt) + until_stop(text, stop)


def stream_text(
    program: Program,
    params: Params,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
    with_prompt: bool = True,
) -> Iterator[str]:
    """Writes the text of `write_text` in pieces: the prompt, and the rest as it is generated.

    No piece ends within a character, or with the beginning of a stop that follows. The model writes
    no more after a stop. Without `with_prompt` there is only what the model adds.

    Raises:
        UserError: as `write_text`, before the first piece.
    """
    ids, vocab_size = _prompt_ids(program, tokenizer, prompt)
    chunks = Generator(program, vocab_size, sampling, tokenizer.ends).stream(params, ids, tokens)
    written = pieces(chunks, _decoder(program, tokenizer, ids), stop)
    begins = _begins(program, prompt) if with_prompt else ""
    return itertools.chain([begins] if begins else [], written)


def _continues(program: Program) -> bool:
    """True for a model that continues its prompt; False if it answers the prompt."""
    writing = family_of(program.config.model).writing
    return writing is not None and writing.continues


def _begins(program: Program, prompt: str) -> str:
    """The beginning of a text: the prompt, if the model continues it."""
    return prompt if _continues(program) else ""


def _decoder(
    program: Program, tokenizer: Tokenizer, ids: Sequence[int]
) -> Callable[[Sequence[int]], str]:
    """Makes the function from the ids that follow a prompt's to their text."""
    return partial(continuation, tokenizer, ids) if _continues(program) else tokenizer.decode


def _prompt_ids(program: Program, tokenizer: Tokenizer, prompt: str) -> tuple[list[int], int]:
    """The ids that a model reads first, and the number of ids that it may write."""
    family = family_of(program.config.model)
    if family.writing is None:
        name = program.config.model.family
        raise UserError(
            f"model.family={name} does not write text; use a decoder such as gpt or llama"
        )
    vocab_size = min(tokenizer.vocab_size, program.config.model.vocab_size or 0)
    ids = with_begin(tokenizer, _ids(prompt, tokenizer, family.special))
    ids += [] if family.writing.continues and ids else [tokenizer.end_of_document]
    if max(ids) >= vocab_size:
        raise UserError(
            f"the prompt {quoted(repr(prompt))} has id {max(ids)}, but the model knows only 0 to "
            f"{vocab_size - 1}; leave {spelling(tokenizer, max(ids))} out of it, or use the "
            "tokenizer that the model was trained with"
        )
    return ids, vocab_size


def _ids(prompt: str, tokenizer: Tokenizer, special: Sequence[str]) -> list[int]:
    """The ids of a prompt that may name special tokens."""
    names = {name: tokenizer.token_id(name) for name in special if name in prompt}
    ids: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, names))})", prompt) if names else [prompt]:
        number = names.get(piece)
        ids += tokenizer.encode(piece).tolist() if number is None else [number]
    return ids


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
    seed: int = 0,
    tp: int = 1,
    stop: Sequence[str] = (),
    speculative: bool = False,
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
        seed: seed for sampling.
        tp: number of devices to split the model over.
        stop: strings that also end the text; they are left out.
        speculative: whether the modules of `model.mtp` draft tokens that the model checks, several
            in one pass; the text is the same.
        layout: layout with other axes than tp.
        platform: as `train.platform`.

    Raises:
        UserError: there is no run, no good checkpoint, or too few devices.
    """
    check_tokens("tokens", tokens)
    sampling = Sampling(temperature, top_k, seed)
    layout = layout or Layout(tp=tp)
    program, params = load_model(
        place(run_dir), layout=layout, platform=platform, modules=speculative
    )
    write = partial(write_text, program, params, tokenizer_of(program.config))
    drafts = Drafts() if speculative else None
    return write(prompt=prompt, tokens=tokens, sampling=sampling, stop=stop, drafts=drafts)


def main(argv: Sequence[str] | None = None) -> int:
    """Generates text with the model of a run, or segments or classifies images."""
    args = parser().parse_args(argv)
    check_options(args)
    layout = Layout(**{axis: getattr(args, axis) for axis in AXES})
    program, params = load_model(
        _run_dir(args), layout=layout, platform=args.platform, modules=bool(args.speculative)
    )
    family = family_of(program.config.model)
    unused, words = (OF_TEXT, "text") if family.classes else (OF_IMAGES, "images")
    if given := [name for name in unused if getattr(args, name) is not None]:
        raise UserError(
            f"--{given[0].replace('_', '-')} is an option for {words}, but the model has "
            f"model.family={program.config.model.family}; leave it out"
        )
    for line in (_classes if family.classes else _text)(args, program, params):
        print(line)
    return 0


def check_options(args: Any) -> None:
    """Raises UserError for numbers that no model accepts, before a model is loaded."""
    if args.tokens is not None and not 1 <= args.tokens <= MOST_TOKENS:
        raise UserError(f"--tokens {args.tokens}: use 1 to {MOST_TOKENS} tokens")
    if args.samples is not None and not 1 <= args.samples <= MOST_IMAGES:
        raise UserError(f"--samples {args.samples}: use 1 to {MOST_IMAGES} images")
    if args.samples is not None and args.images:
        raise UserError("--samples (held-out images) and --images are both given; use one")
    _sampling(args)


def _sampling(args: Any) -> Sampling:
    names = ("temperature", "top_k", "seed")
    return Sampling(**{n: getattr(args, n) for n in names if getattr(args, n) is not None})


def _text(args: Any, program: Program, params: Params) -> Iterator[str]:
    """Yields what the command prints for text."""
    asked = (program, params, tokenizer_of(program.config))
    options: dict[str, Any] = {
        "prompt": args.prompt or "",
        "tokens": args.tokens or DEFAULT_TOKENS,
        "sampling": _sampling(args),
        "stop": args.stop or (),
    }
    prompt, drafts = options["prompt"], Drafts() if args.speculative else None
    if not (drafts or args.json) and sys.stdout.isatty():
        for piece in stream_text(*asked, **options, with_prompt=not args.quiet):
            print(printable(piece, sys.stdout.encoding), end="", flush=True)
        yield ""  # ends the last line
        return
    text = write_text(*asked, **options, drafts=drafts)
    if args.json:
        counts = {"drafts": dataclasses.asdict(drafts)} if drafts else {}
        yield json.dumps({"prompt": prompt, "text": text} | counts)
        return
    text = text.removeprefix(prompt) if args.quiet else text
    yield printable(text, sys.stdout.encoding)
    if drafts and not args.quiet:
        print(drafts, file=sys.stderr)


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


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd generate --run-dir runs/quickstart --prompt 'class '",
        "jaxptd generate --config quickstart --tokens 500 --temperature 0.5 --seed 1",
        "jaxptd generate --run-dir runs/swin-unet-shapes --images slices/ --out masks",
    )
    parser = Parser(prog="jaxptd generate", description=main.__doc__, examples=examples)
    add = parser.add_argument
    help_text = "train.run_dir of the run, or a Hugging Face directory; or a URL"
    add("--run-dir", type=place_option, metavar="D", help=help_text)
    add("--config", metavar="F", help="config of the run, instead of its directory")
    add("--prompt", help="text to continue; empty starts a document")
    add("--tokens", type=int, metavar="N", help=f"tokens to generate; default: {DEFAULT_TOKENS}")
    help_text = f"0 always takes the most likely token; default: {Sampling.temperature}"
    add("--temperature", type=float, metavar="X", help=help_text)
    help_text = f"sample from the k most likely tokens, 0 from all; default: {Sampling.top_k}"
    add("--top-k", type=int, metavar="N", help=help_text)
    add("--seed", type=int, metavar="N", help=f"seed of the sampling; default: {Sampling.seed}")
    help_text = "stop before this text, as at the model's end tokens; repeatable"
    add("--stop", action="append", metavar="TEXT", help=help_text)
    help_text = "let the modules of model.mtp draft tokens that the model checks; the same text"
    add("--speculative", action="store_true", default=None, help=help_text)
    help_text = "image models: .npz, .npy or .png files, or folders of them"
    add("--images", type=path_option, nargs="+", metavar="F", help=help_text)
    help_text = f"image models: number of held-out images to use; default: {DEFAULT_IMAGES}"
    add("--samples", type=int, metavar="N", help=help_text)
    help_text = "folder for masks and overlays (.png); default: masks in the run's directory"
    add("--out", type=path_option, metavar="D", help=help_text)
    for axis in AXES:
        names = ("--tp", "--layout.tp") if axis == "tp" else (f"--layout.{axis}",)
        add(*names, dest=axis, type=int, default=1, metavar="N", help="devices; default: 1")
    help_text = "cpu simulates devices; default: auto"
    platforms = ("auto", "cpu")
    add("--platform", "--train.platform", choices=platforms, default="auto", help=help_text)
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
